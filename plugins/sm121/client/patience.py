"""The time limits that the timed client and the load client share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """The time limits of a request.

    The timed client counts silence from the first byte on. The load client counts it from the
    request, and tolerates the silence of a queued request while others get their tokens.

    Attributes:
        within_s: Seconds that the whole request may take.
        silent_s: Seconds that may pass without data.
    """

    within_s: float
    silent_s: float
