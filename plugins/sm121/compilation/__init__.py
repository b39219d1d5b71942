"""Compiling for GB10 without one, and reading the device code of what was compiled."""
