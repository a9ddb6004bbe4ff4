"""Phi-4-multimodal: a model that listens, and answers in words."""
