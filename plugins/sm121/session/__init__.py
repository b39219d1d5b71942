"""A run from its start to its final report, with or without pytest."""
