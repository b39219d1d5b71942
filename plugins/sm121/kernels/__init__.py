"""Kernel providers, the problems that they are tested on, and the tolerances of their results."""
