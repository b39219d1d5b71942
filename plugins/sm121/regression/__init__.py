"""Regression: this run against the stored ones, and one side against another."""
