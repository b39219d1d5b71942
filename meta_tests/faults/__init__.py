"""Injected faults, and the programs and tests that check whether each fault is detected."""
