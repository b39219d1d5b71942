"""The time limits that the timed client and the load client share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """The time limits of a request.

    The timed client counts the time without data from the first byte of an answer. The load client
    counts it from the request, and tolerates it for a queued request as long as other requests get
    tokens.

    Attributes:
        within_s: The time limit of the whole request, in seconds.
        silent_s: The maximum time without data, in seconds.
    """

    within_s: float
    silent_s: float
