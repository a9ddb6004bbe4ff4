"""Speech evaluation: word errors, speaker similarity, MOS and stopping. Scorers are optional packages."""
