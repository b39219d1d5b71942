"""The public name of `sm121.run.verdict_file` (docs/python-api.md)."""

from sm121.run.verdict_file import VerdictFile, read

__all__ = ["VerdictFile", "read"]
