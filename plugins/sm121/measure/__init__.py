"""Measure a server: timed requests, checks of validity, statistics and gates."""
