"""A run from its opening to its last word, with or without pytest."""
