"""The published name of `sm121.core.verdict` (docs/python-api.md)."""

from sm121.core.verdict import Inconclusive, Invalid, NotRun, Verdict

__all__ = ["Inconclusive", "Invalid", "NotRun", "Verdict"]
