"""The published names of `sm121.core.verdict` and `sm121.core.unmet` (docs/python-api.md)."""

from sm121.core.unmet import Fact, Unmet, require
from sm121.core.verdict import Inconclusive, Invalid, NotRun, Verdict

__all__ = ["Fact", "Inconclusive", "Invalid", "NotRun", "Unmet", "Verdict", "require"]
