"""Execute releases of vLLM to find out which arguments they accept and which kernels they choose on
a GB10: ``python -m tools.choices``.
"""
