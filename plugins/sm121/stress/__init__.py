"""Loads of every shape, with each answer checked, and the server's state during and after them."""
