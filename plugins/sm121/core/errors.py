"""The errors that a user can act on. Each message is one line: required, seen, remedy."""


class Sm121Error(Exception):
    """Base of every error that the suite raises on purpose."""


class UsageError(Sm121Error):
    """What was asked for is wrong. Raised before anything expensive starts; exit status 4."""
