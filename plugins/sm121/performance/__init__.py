"""The performance level: measuring a server, and recording what was measured with its verdict."""
