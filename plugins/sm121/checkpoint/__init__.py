"""Inspect checkpoints, and build the canary, a tiny gpt-oss that was trained for tests."""
