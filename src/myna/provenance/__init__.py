"""Marks of generated speech, stored voices and their consents."""
