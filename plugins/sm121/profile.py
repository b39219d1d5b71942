"""The published name of `sm121.core.profile` (docs/python-api.md)."""

from sm121.core.profile import Profile, load
from sm121.core.profile_fields import Gate

__all__ = ["Gate", "Profile", "load"]
