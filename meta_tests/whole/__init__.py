"""Whole runs of pytest, of a real vLLM and of the stand-in for a GB10."""
