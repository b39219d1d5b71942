"""Engines under test: starting, watching and stopping them, or attaching to a running one."""
