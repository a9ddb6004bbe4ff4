"""Training of the fledgling codec; not part of the myna package."""
