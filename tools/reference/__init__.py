"""Pages of the documentation that are made from code and data, so that they cannot drift."""
