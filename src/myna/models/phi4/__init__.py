"""Phi-4-multimodal: a speech language model that answers in text."""
