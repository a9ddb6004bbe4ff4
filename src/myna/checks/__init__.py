"""Checks of a machine and of a model: `myna doctor` and `myna verify`."""
