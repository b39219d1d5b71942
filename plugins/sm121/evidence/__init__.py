"""The evidence of a run: kernel path, causes of failures, reproducibility record."""
