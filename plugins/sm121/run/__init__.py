"""A run: its events, its verdict file, its report directory, and the merge of several parts."""
