"""HTTP server on the speech engine."""
