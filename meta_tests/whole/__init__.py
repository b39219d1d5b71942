"""Whole runs of pytest, of a real vLLM, and of the simulated GB10."""
