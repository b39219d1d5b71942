"""The matrix level: features as axes, the tested combinations (cells), and their outcomes."""
