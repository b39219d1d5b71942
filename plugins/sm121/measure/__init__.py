"""Measuring a server: client, clocks, validity, statistics, gates, the machine."""
