"""The published name of `sm121.core.profile` (docs/python-api.md)."""

from sm121.core.profile import Gate, Profile, load

__all__ = ["Gate", "Profile", "load"]
