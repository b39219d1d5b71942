"""Regression: this run compared with stored runs, and A compared with B."""
