"""Checkpoints: formats and contradictions, and the canary, a tiny trained gpt-oss."""
