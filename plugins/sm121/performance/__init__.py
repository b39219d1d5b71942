"""The performance level: measures a server, and records each measurement with its verdict."""
