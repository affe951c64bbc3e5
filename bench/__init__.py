"""Comparison with Hugging Face transformers, which no other room imports; kernels compiled and
counted without a GPU."""
