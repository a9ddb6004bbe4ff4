"""Marks on what is spoken: watermark, content credentials, and a log."""
