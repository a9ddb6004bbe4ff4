"""What it takes to make the corpora of fledgling out of packages, and no part of Myna itself."""
