"""What a release of vLLM takes and chooses on a GB10, executed: ``python -m tools.choices``."""
