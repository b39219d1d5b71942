"""What the model of a profile is too small for: such a test is NOT_RUN, and no certificate of that
profile needs it."""

from __future__ import annotations

from typing import get_args

import pytest

from sm121.core.profile import Ability, Profile


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ability(name): needs a model that can do this; a profile says in [correctness.cannot] "
        "what its model cannot",
    )


def inability(item: pytest.Item, profile: Profile | None) -> str | None:
    """Why the profile's model cannot pass a test; None if it is to."""
    marker = item.get_closest_marker("ability")
    if marker is None or profile is None:
        return None
    (name,) = marker.args
    if name not in get_args(Ability):
        raise pytest.UsageError(f"{item.nodeid}: ability({name!r}): expected {get_args(Ability)}")
    reason = profile.correctness.cannot.get(name)
    return f"profile {profile.name}: {name}: {reason}" if reason else None
