"""Metrics of codec round trips."""
