"""Certificate of a model on the user's own weights and device."""
