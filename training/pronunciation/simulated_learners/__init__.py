"""Simulated language learners: their sentences, mispronunciations and scores."""
