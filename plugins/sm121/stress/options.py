"""The options of the stress level."""

from dataclasses import dataclass

from sm121.core.option_values import checked_by, whole_number
from sm121.core.options import option
from sm121.stress import soak


@dataclass(frozen=True)
class StressOptions:
    """The options of the stress level."""

    #: The duration in seconds.
    soak_s: float | None = option(
        "--soak",
        checked_by(soak.parse_duration, wrong=("30", "2 weeks", "0s", "31d")),
        metavar="DURATION",
        help=(
            "add a mixed load of this duration (for example 30s, 10m, 2h), with all checks of "
            "the stress level (default: no soak)"
        ),
    )
    requests: int | None = option(
        "--requests",
        # A GB10 needs half a day for this many short requests.
        whole_number(100_000, "requests of the load"),
        metavar="N",
        help=(
            "number of requests that a load of the stress level sends, for example 200 (default: "
            "the profile's number)"
        ),
    )
    crowd: int | None = option(
        "--crowd",
        # The bound is the largest default of vLLM's --max-num-seqs.
        whole_number(1024, "requests at the same time"),
        metavar="N",
        help=(
            "number of requests of the stress level that run at the same time, for example 8 "
            "(default: the profile's number); --concurrency is for measured rates"
        ),
    )
