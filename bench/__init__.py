"""Comparison with Hugging Face transformers; the only room that imports it."""
