"""Raw recordings to a clean dataset, and the X-ray of it."""
