"""Measuring a server: requests and their clocks, checks of validity, statistics and gates."""
