"""Simulated engines, nodes and clients for the tests."""
