"""Checks of a machine and of a model, each with what to type where something is wrong."""
