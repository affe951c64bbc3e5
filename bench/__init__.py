"""Parity, benchmarks, scores and their report; kernels compiled and counted without a GPU."""
