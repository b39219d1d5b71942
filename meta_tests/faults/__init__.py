"""Catalogues of planted faults, and the tests that run them."""
