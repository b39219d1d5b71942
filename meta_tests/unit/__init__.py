"""Tests of the package. Each of its packages has a folder here."""
