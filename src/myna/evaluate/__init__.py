"""Speech evaluation: systems, items, metrics, comparison, ranking of checkpoints. Scorers are optional packages."""
