"""Read the counters in a server's /metrics before and after a measurement."""

import math
import time
import tomllib
from dataclasses import dataclass, field
from importlib.resources import files

from sm121.client.exposition import samples_of
from sm121.core.server import Endpoint

_FILE = files("sm121.fixtures") / "counters.toml"
_NAMES: dict[str, list[str]] = tomllib.loads(_FILE.read_text("utf-8"))
_OUR_NAMES = {counter: name for name, names in _NAMES.items() for counter in names}
#: A metric that has one sample per position in the draft. The label ``position`` is the position.
_BY_POSITION = ("vllm:spec_decode_num_accepted_tokens_per_pos_total",)
#: How long to wait for the final counters, in seconds. The engine updates them shortly after the
#: last byte of an answer.
_SETTLE_WITHIN_S = 2.0
#: Values that can also decrease, so that they are not counters.
_GAUGES = ("running", "waiting", "cache_usage")


@dataclass(frozen=True)
class Counters:
    """The counters at one time, with the suite's names.

    Counters that the server lacks are absent.
    """

    values: dict[str, float] = field(default_factory=dict)
    #: The names of counters that are NaN or infinite. They are absent in ``values``.
    no_number: frozenset[str] = frozenset()

    def since(self, earlier: "Counters") -> dict[str, float]:
        """Return by how much each counter has grown. For a gauge, return the current value.

        Args:
            earlier: The counters at the start. Counters that were NaN or infinite are omitted.
        """
        changes = {}
        for name, value in self.values.items():
            if name in _GAUGES:
                changes[name] = value
            elif name not in earlier.no_number:
                changes[name] = value - earlier.values.get(name, 0.0)
        return changes


def names(engine: str) -> set[str]:
    """Return the suite's names of the counters that an engine has.

    Args:
        engine: The prefix of the engine's metrics, for example ``vllm``.
    """
    prefix = f"{engine}:"
    found = set()
    for name, metric_names in _NAMES.items():
        if any(metric.startswith(prefix) for metric in metric_names):
            found.add(name)
    return found


def parse_counters(text: str) -> Counters:
    """Return the counters in a text of Prometheus metrics, summed over engines and models.

    Args:
        text: The text of /metrics.
    """
    values: dict[str, float] = {}
    for sample in samples_of(text, _OUR_NAMES.__contains__):
        counter = _OUR_NAMES[sample.name]
        values[counter] = values.get(counter, 0.0) + sample.value
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return Counters(finite, frozenset(values.keys() - finite.keys()))


def fetch(endpoint: Endpoint) -> Counters | None:
    """Return the current counters in /metrics.

    Args:
        endpoint: The server.

    Returns:
        The counters; None if /metrics cannot be read, or contains none of them.
    """
    text = endpoint.page("/metrics")
    now = parse_counters(text) if text is not None else Counters()
    return now if now.values or now.no_number else None


def fetch_quiet(endpoint: Endpoint) -> Counters | None:
    """Wait until the counters no longer change, so that they include all requests; return them.

    Args:
        endpoint: The server.

    Returns:
        The counters after at most about 2 s, even if they still change; None as for `fetch`.
    """
    deadline = time.monotonic() + _SETTLE_WITHIN_S
    before = fetch(endpoint)
    while before is not None:
        time.sleep(0.1)
        now = fetch(endpoint)
        if now is None or now == before or time.monotonic() > deadline:
            return now
        before = now
    return None


def fetch_settled(endpoint: Endpoint, before: Counters | None, generated: int) -> Counters | None:
    """Wait until the counters include the generated tokens, at most until a timeout; return them.

    Args:
        endpoint: The server.
        before: The counters before the requests; None if the server has none.
        generated: The number of tokens that were generated since `before`.
    """
    deadline = time.monotonic() + _SETTLE_WITHIN_S
    while True:
        now = fetch(endpoint)
        if now is None or before is None:
            return now
        delta = now.since(before)
        counted = delta.get("generated", float(generated)) >= generated
        idle = not delta.get("running") and not delta.get("waiting")
        if (counted and idle) or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


@dataclass(frozen=True)
class Drafted:
    """The numbers of drafts and of their tokens, since the engine's start or between two times."""

    drafts: float
    tokens: float
    accepted: float
    #: The accepted tokens at each position in the draft; empty if the server does not count them.
    by_position: tuple[float, ...] = ()

    def since(self, earlier: "Drafted") -> "Drafted":
        """Return the numbers of drafts since an earlier reading.

        Args:
            earlier: The reading at the beginning.
        """
        by_position = list(self.by_position)
        for position, accepted in enumerate(earlier.by_position[: len(by_position)]):
            by_position[position] -= accepted
        return Drafted(
            drafts=self.drafts - earlier.drafts,
            tokens=self.tokens - earlier.tokens,
            accepted=self.accepted - earlier.accepted,
            by_position=tuple(by_position),
        )

    @property
    def accepted_length(self) -> float | None:
        """The mean number of tokens per step, including the model's own; None without a draft."""
        if not self.drafts:
            return None
        return 1.0 + self.accepted / self.drafts

    def __str__(self) -> str:
        by = ", ".join(f"{count:.0f}" for count in self.by_position) or "unknown"
        return (
            f"{self.drafts:.0f} drafts of {self.tokens:.0f} tokens, {self.accepted:.0f} accepted "
            f"(by position: {by})"
        )


def drafted(endpoint: Endpoint) -> Drafted | None:
    """Wait until the counters of drafts no longer change; return them.

    Args:
        endpoint: The server.

    Returns:
        The numbers since the engine's start; None if the server does not count drafts.
    """
    if fetch_quiet(endpoint) is None:
        return None
    text = endpoint.page("/metrics") or ""
    values = parse_counters(text).values
    if "drafts" not in values:
        return None
    accepted: dict[int, float] = {}
    for sample in samples_of(text, _BY_POSITION.__contains__):
        place = sample.labels.get("position", "")
        if place.isdigit():
            position = int(place)
            accepted[position] = accepted.get(position, 0.0) + sample.value
    return Drafted(
        drafts=values["drafts"],
        tokens=values.get("draft_tokens", 0.0),
        accepted=values.get("accepted_tokens", 0.0),
        by_position=tuple(accepted[position] for position in sorted(accepted)),
    )
