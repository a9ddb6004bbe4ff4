"""A model that clones voices, judged by voices and lines that it never learned from."""
