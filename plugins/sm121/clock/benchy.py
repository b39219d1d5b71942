"""Print the rates of one stream in llama-benchy's columns (eugr/llama-benchy, ``results.py``)."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sm121 import __version__
from sm121.core.printable import printable

_HEADER = ("model", "test", "t/s", "peak t/s", "ttfr (ms)", "est_ppt (ms)", "e2e_ttft (ms)")
_METHOD = "latency mode: none, pp = prompt tokens / time to the first token"


@dataclass(frozen=True)
class BenchyRate:
    """A rate of one stream.

    Attributes:
        kind: The kind of rate and the number of tokens, for example ``pp2048`` or ``tg32``.
        depth: The number of tokens of context before the prompt.
        prompt_tokens: For a prefill rate, the number of tokens of the whole prompt; None for a
            decode rate.
        value: The rate in tokens per second. It is shown if there are no samples.
        samples: The rate of each round; empty if the rate of some round is unknown or a request
            failed.
    """

    kind: str
    depth: int
    prompt_tokens: int | None
    value: float
    samples: Sequence[float] = ()

    @property
    def place(self) -> tuple[int, bool]:
        """A sort key for llama-benchy's order: by depth, and prefill before decode."""
        return self.depth, self.prompt_tokens is None

    def cells(self, model: str) -> list[str]:
        """Return the cells of this rate's row. Columns that the suite does not measure are empty.

        Args:
            model: The name of the model.
        """
        test = f"{self.kind} @ d{self.depth}" if self.depth else self.kind
        first_token = ""
        if self.prompt_tokens is not None:
            times = [1000.0 * self.prompt_tokens / rate for rate in self.samples if rate > 0.0]
            first_token = _scatter(times)
        rate = _scatter(self.samples) or f"{self.value:.2f}"
        return [model, test, rate, "", "", "", first_token]


def table(model: str, rates: Sequence[BenchyRate], started: str) -> str:
    """Return rates as llama-benchy prints them; empty if there are no rates.

    A cell contains the mean ± standard deviation over the rounds. If there are no samples, it
    contains only the value.

    Args:
        model: The name of the model.
        rates: The rates, in any order.
        started: When the measurement began.
    """
    if not rates:
        return ""
    rule = [":---", *["---:"] * (len(_HEADER) - 1)]
    rows: list[Sequence[str]] = [_HEADER, rule]
    for rate in sorted(rates, key=lambda rate: rate.place):
        rows.append(rate.cells(model))
    tool = f"sm121-conformance ({__version__})"
    return f"{piped(rows)}\n{tool}\ndate: {started} | {_METHOD}\n"


def piped(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as a Markdown table.

    Args:
        rows: The cells of each row. The first two rows are the header and the line below it.
    """
    lines = []
    for row in rows:
        cells = [printable(cell).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def _scatter(values: Sequence[float]) -> str:
    """Return mean ± population standard deviation, as llama-benchy does (numpy's ``std``)."""
    if not values:
        return ""
    return f"{statistics.fmean(values):.2f} ± {statistics.pstdev(values):.2f}"
