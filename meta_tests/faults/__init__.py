"""Catalogues of injected faults, and the tests that run them."""
