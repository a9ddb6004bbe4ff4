"""What it takes to train the codec of fledgling, and no part of Myna itself."""
