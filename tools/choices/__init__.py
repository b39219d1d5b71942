"""Execute releases of vLLM to find out what they accept and choose on a GB10: ``python -m
tools.choices``."""
