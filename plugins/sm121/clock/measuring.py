"""Measure the rates and times of one stream of a server."""

import datetime
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sm121.client import models
from sm121.clock import benchy
from sm121.clock.benchy import BenchyRate
from sm121.core.address import root_of
from sm121.core.errors import UsageError
from sm121.core.measuring_settings import MeasuringSettings
from sm121.core.metric_name import without_depth
from sm121.core.numbers import number
from sm121.core.printable import printable
from sm121.core.server import NO_KEY, Endpoint, context_of
from sm121.measure import conclusion
from sm121.measure.cells import Cells, MeasuredCell
from sm121.measure.measured_server import MeasuredServer, Show
from sm121.measure.measurement import Measurement
from sm121.measure.metrics import Metric
from sm121.measure.metrics.pp import PrefillRate
from sm121.measure.metrics.tg import DecodeRate
from sm121.measure.metrics.times import TimePerToken, TimeToFirstToken
from sm121.measure.plan import MOST_ROUNDS, Plan
from sm121.measure.statistics import Estimate

#: The timeout of the request for the server's list of models, in seconds.
_ANSWER_WITHIN_S = 10.0
_MEDIAN = 0.5


@dataclass(frozen=True)
class Number:
    """A measured quantity.

    Attributes:
        measurement: The samples, how tokens were counted, and the reasons why the samples are
            invalid.
        estimate: The value with its interval; None if nothing was measured.
        depth: The number of tokens of context before the prompt.
        metric: The key of the metric, for example ``tg`` for ``tg32@d0``.
    """

    measurement: Measurement
    estimate: Estimate | None
    depth: int
    metric: str

    @property
    def value(self) -> float | None:
        """The median of the samples, in the measurement's unit; None if nothing was measured."""
        return None if self.estimate is None else self.estimate.value

    @property
    def valid(self) -> bool:
        """Whether there are samples, and they are valid."""
        return self.estimate is not None and self.measurement.valid

    def __str__(self) -> str:
        name = self.measurement.name
        if self.estimate is None:
            return f"{name}: nothing was measured"
        text = f"{name}: {number(self.estimate.value)} {self.measurement.unit}"
        low, high = self.estimate.ci_low, self.estimate.ci_high
        if low is None or high is None:
            return text
        return f"{text} ({number(low)} to {number(high)})"


@dataclass(frozen=True)
class Result:
    """The numbers of a server.

    Attributes:
        model: The name of the server's model.
        started: When the measurement began, in ISO 8601.
        prompt_tokens: The number of tokens of the prompt, without the depth.
        numbers: The numbers; the keys are their names, for example ``tg32@d0``.
    """

    model: str
    started: str
    prompt_tokens: int
    numbers: Mapping[str, Number]

    @property
    def valid(self) -> bool:
        """Whether all numbers are valid."""
        return all(each.valid for each in self.numbers.values())

    def table(self) -> str:
        """Return the rates as llama-benchy prints them."""
        rates = []
        for name, each in self.numbers.items():
            if each.measurement.unit == "tok/s" and each.estimate is not None:
                rates.append(self._benchy_rate(name, each.estimate.value, each))
        return benchy.table(self.model, rates, self.started)

    def _benchy_rate(self, name: str, value: float, each: Number) -> BenchyRate:
        samples: Sequence[float] = each.measurement.samples
        if any(not 0.0 < sample < math.inf for sample in samples):
            samples = ()  # a request has failed
        is_prefill = each.metric == PrefillRate.key
        return BenchyRate(
            kind=without_depth(name),
            depth=each.depth,
            prompt_tokens=self.prompt_tokens + each.depth if is_prefill else None,
            value=value,
            samples=samples,
        )

    def problems(self) -> list[str]:
        """Return one line for each invalid number, skipped check or limitation of the client."""
        lines = []
        not_checked: dict[str, None] = {}
        for name, each in self.numbers.items():
            for reason in each.measurement.invalid:
                lines.append(printable(f"{name}: INVALID: {reason}"))
            if each.estimate is None:
                lines.append(f"{name}: INVALID: nothing was measured")
            not_checked.update(dict.fromkeys(each.measurement.unproven))
        lines += [printable(f"not checked: {check}") for check in not_checked]
        loops = {each.measurement.extra.get("client_loop") for each in self.numbers.values()}
        if "asyncio" in loops:
            lines.append("client: the event loop of asyncio, since uvloop is not installed")
        return lines

    def __str__(self) -> str:
        numbers = "".join(f"{each}\n" for each in self.numbers.values())
        problems = "".join(f"{line}\n" for line in self.problems())
        return f"{self.table()}\n{numbers}{problems}"


def _nothing(_line: str) -> None:
    """Do not show progress."""


def measure(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    prompt_tokens: int = 2048,
    tokens: Sequence[int] = (32, 128),
    depths: Sequence[int] = (0,),
    rounds: int = 5,
    records: Path | None = None,
    show: Show = _nothing,
) -> Result:
    """Measure a running server: pp and tg at each depth, TTFT and TPOT only at the first depth.

    Args:
        url: The address of the server, with or without /v1.
        model: The name of the model; None if the server has only one model.
        api_key: The server's API key; None if it needs none.
        prompt_tokens: The length of the prompt, in tokens.
        tokens: The numbers of tokens for which decode rates are computed.
        depths: The numbers of tokens of context before the prompt.
        rounds: The number of long answers at each depth.
        records: The folder for the raw answers; None to not store them.
        show: Prints a progress line.

    Raises:
        UsageError: No server answers, it does not serve the model, or a length is invalid.
        NotRun: The server's context is too short.
        Sm121Error: The server accepts neither token ids nor text.
    """
    plan = _plan(prompt_tokens, tokens, depths, rounds)
    now = datetime.datetime.now(datetime.UTC)
    started = now.isoformat(timespec="seconds")
    endpoint, context = _find(url, model, api_key)
    with ExitStack() as stack:
        folder = records
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sm121-clock-")))
        server = stack.enter_context(MeasuredServer.open(endpoint, plan, folder, show=show))
        server.context = context
        numbers = _numbers(server, plan)
    return Result(endpoint.served_name, started, prompt_tokens, numbers)


def _plan(prompt_tokens: int, tokens: Sequence[int], depths: Sequence[int], rounds: int) -> Plan:
    for name, given in {"tokens": tokens, "depths": depths}.items():
        if not isinstance(given, Sequence):
            raise UsageError(f"{name}: expected a list of numbers, got {given!r}")
    lengths = {"prompt_tokens": (prompt_tokens,), "tokens": tokens, "rounds": (rounds,)}
    for name, values in lengths.items():
        if not values or min(values) < 1:
            raise UsageError(f"{name}: expected 1 or more, got {list(values)}")
    if rounds > MOST_ROUNDS:
        raise UsageError(f"rounds: expected at most {MOST_ROUNDS}, got {rounds}")
    if not depths or min(depths) < 0:
        raise UsageError(f"depths: expected 0 or more, got {list(depths)}")
    return Plan(
        prompt_tokens=prompt_tokens,
        generated_tokens=tuple(sorted({*tokens})),
        depths=tuple(dict.fromkeys(depths)),
        measuring=MeasuringSettings(rounds=rounds),
    )


def _find(url: str, model: str | None, api_key: str | None) -> tuple[Endpoint, int | None]:
    """Return the server's endpoint and the length of its context."""
    address = root_of(url, "URL")
    endpoint = Endpoint(address, api_key or NO_KEY, model or "")
    expected = f"URL {address}: expected an OpenAI-compatible server"
    with endpoint.http(timeout_s=_ANSWER_WITHIN_S) as http:
        listed = models.listed(http, expected)
    names = [str(entry["id"]) for entry in listed["data"]]
    if model is None and len(names) == 1:
        model = names[0]
    if model not in names:
        wanted = f"a server of {model!r}" if model else "one model, or its name (--model)"
        served = printable(", ".join(names) or "nothing")
        raise UsageError(f"URL {address}: expected {wanted}, got {served}")
    return Endpoint(address, endpoint.api_key, model), context_of(listed, model)


def _numbers(server: MeasuredServer, plan: Plan) -> dict[str, Number]:
    cells = Cells(server)
    chosen: list[tuple[Metric, MeasuredCell]] = []
    for depth in plan.depths:
        cell = cells.cell(depth).gather(plan.measuring.rounds)
        chosen.append((PrefillRate(), cell))
        chosen += [(DecodeRate(tokens), cell) for tokens in plan.generated_tokens]
    first = cells.cell(plan.depths[0])
    chosen.append((TimeToFirstToken(quantile=_MEDIAN), first))
    chosen.append((TimePerToken(quantile=_MEDIAN), first))
    for metric, cell in chosen:
        metric.settle(cell)
    numbers = {}
    # Each number uses all rounds, including those that were measured for other metrics.
    for metric, cell in chosen:
        measurement = metric.of(cell)
        estimate = conclusion.estimate_of(measurement)
        numbers[measurement.name] = Number(measurement, estimate, cell.depth, metric.key)
    return numbers
