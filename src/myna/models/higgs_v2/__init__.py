"""Higgs Audio v2: a Llama with a second FFN for audio, eight delayed codebooks, and a 25 Hz codec."""
