"""Models that hear: recognisers, voice activity, speakers, noise, music, predicted quality."""
