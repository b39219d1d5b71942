"""The state of the machine: whether its numbers can be trusted today."""

from __future__ import annotations

from enum import StrEnum


class BoxState(StrEnum):
    """Whether performance can be judged on this machine now."""

    QUALIFIED = "QUALIFIED"
    DEGRADED = "DEGRADED"
    UNKNOWN = "UNKNOWN"
