"""A GB10 that is not there (`machine`), and what the suite says of healthy and sick ones."""
