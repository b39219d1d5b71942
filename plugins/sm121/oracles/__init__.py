"""Reference mathematics, written from the specifications in float64."""
