"""Ears of others, to judge the codec of fledgling by."""
