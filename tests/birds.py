"""Recordings that tests make for themselves: two birds that whistle letters, each in its own register.

A tiny model of random weights can learn them by heart in a minute, code for code, so they show whether the way through
is sound; how a voice sounds they cannot show.
"""

from myna.demo.birds import BIRDS, LINES, REFERENCE, SAMPLE_RATE, match, recipe, record, whistle

__all__ = ["BIRDS", "LINES", "REFERENCE", "SAMPLE_RATE", "match", "recipe", "record", "whistle"]
