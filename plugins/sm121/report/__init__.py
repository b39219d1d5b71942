"""The verdict's model and the files that are written from it."""
