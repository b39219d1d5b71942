"""Tests of the suite itself."""
