"""Compile for GB10 without a GB10, and read the device code of the result."""
