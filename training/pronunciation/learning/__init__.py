"""Learners who do not exist: what they read, what goes wrong when they do, and how that is scored."""
