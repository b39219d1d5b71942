"""Load of every shape, each answer checked, and what the server is like during it and after it."""
