"""Generate the pages of the documentation that are made from code and data."""
