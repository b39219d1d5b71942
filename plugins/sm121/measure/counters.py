"""The server's own counters: what it says that it did while something was measured."""

import math
import time
import tomllib
from dataclasses import dataclass, field
from importlib.resources import files

from sm121.core.server import Endpoint
from sm121.evidence import metrics

_FILE = files("sm121.fixtures") / "counters.toml"
_NAMES: dict[str, list[str]] = tomllib.loads(_FILE.read_text("utf-8"))
_OUR_NAMES = {counter: name for name, names in _NAMES.items() for counter in names}
#: One sample a position of the draft, by its label.
_BY_POSITION = ("vllm:spec_decode_num_accepted_tokens_per_pos_total",)
#: The counters are written by the engine's loop, shortly after the answer's last byte.
_SETTLE_WITHIN_S = 2.0


@dataclass(frozen=True)
class Counters:
    """Values at one moment, by our names; what the server does not have is absent."""

    values: dict[str, float] = field(default_factory=dict)
    #: What the server has, but says no number of (NaN, or infinite); absent in ``values``.
    no_number: frozenset[str] = frozenset()

    def since(self, earlier: "Counters") -> dict[str, float]:
        """How far each counter went on; gauges as they are; absent without a number."""
        gauges = ("running", "waiting", "cache_usage")
        return {
            name: value if name in gauges else value - earlier.values.get(name, 0.0)
            for name, value in self.values.items()
            if name in gauges or name not in earlier.no_number
        }


def names(engine: str) -> set[str]:
    """Our names of what an engine tells."""
    prefix = f"{engine}:"
    return {name for name, all_ in _NAMES.items() if any(n.startswith(prefix) for n in all_)}


def read(text: str) -> Counters:
    """The counters in a Prometheus exposition, summed over engines and models."""
    values: dict[str, float] = {}
    for name, _, value, _ in metrics.samples_of(text, _OUR_NAMES.__contains__):
        values[_OUR_NAMES[name]] = values.get(_OUR_NAMES[name], 0.0) + value
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return Counters(finite, frozenset(values.keys() - finite.keys()))


def fetch(endpoint: Endpoint) -> Counters | None:
    """What /metrics says now; None where there is no such thing, or it cannot be read."""
    text = endpoint.page("/metrics")
    now = read(text) if text is not None else Counters()
    return now if now.values or now.no_number else None


def fetch_quiet(endpoint: Endpoint) -> Counters | None:
    """The counters once they stand still: what was done before is in them."""
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
    """The counters once they contain what was generated, or when that took too long."""
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
    """What an engine drafted since its start, or between two moments."""

    drafts: float
    tokens: float
    accepted: float
    #: Accepted tokens by their place in the draft, from the first; empty where that is not told.
    by_position: tuple[float, ...] = ()

    def since(self, earlier: "Drafted") -> "Drafted":
        """What came since an earlier moment."""
        before = (*earlier.by_position, *(0.0,) * len(self.by_position))
        return Drafted(
            self.drafts - earlier.drafts,
            self.tokens - earlier.tokens,
            self.accepted - earlier.accepted,
            tuple(now - then for now, then in zip(self.by_position, before, strict=False)),
        )

    @property
    def accepted_length(self) -> float | None:
        """Tokens of a step, the one that is always right included; None without a draft."""
        return 1.0 + self.accepted / self.drafts if self.drafts else None

    def __str__(self) -> str:
        by = ", ".join(f"{count:.0f}" for count in self.by_position) or "not told"
        return (
            f"{self.drafts:.0f} drafts of {self.tokens:.0f} tokens, {self.accepted:.0f} accepted "
            f"(by position: {by})"
        )


def drafted(endpoint: Endpoint) -> Drafted | None:
    """What was drafted so far, once the counters stand still; None where there are none."""
    if fetch_quiet(endpoint) is None:
        return None
    text = endpoint.page("/metrics") or ""
    values = read(text).values
    if "drafts" not in values:
        return None
    accepted: dict[int, float] = {}
    for _, labels, value, _ in metrics.samples_of(text, _BY_POSITION.__contains__):
        if labels.get("position", "").isdigit():
            position = int(labels["position"])
            accepted[position] = accepted.get(position, 0.0) + value
    return Drafted(
        values["drafts"],
        values.get("draft_tokens", 0.0),
        values.get("accepted_tokens", 0.0),
        tuple(accepted[position] for position in sorted(accepted)),
    )
