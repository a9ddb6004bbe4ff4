"""Evaluation of voice cloning on held-out speakers and sentences."""
