"""Whose kernels the kernel level tests, on what, and how far they may be from the oracle."""
