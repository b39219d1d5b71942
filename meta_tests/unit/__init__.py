"""Tests of the package, a folder for each of its packages."""
