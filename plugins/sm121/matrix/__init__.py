"""The matrix: features as axes, the combinations that are tried, and their outcomes."""
