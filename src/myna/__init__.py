"""Myna teaches speech language models a voice: recordings in, speech out."""

__version__ = "0.1.0"
