"""The matrix: features as axes, the combinations that must be tried, and what became of each."""
