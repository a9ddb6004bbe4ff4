"""Making of the fledgling corpora; not part of the myna package."""
