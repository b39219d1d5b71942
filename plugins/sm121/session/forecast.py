"""How long a run will take: from what took how long on this machine, else from rates. A check that
an earlier run on this machine has timed takes as long as it did there. Of the others
``fixtures/costs.toml`` says what a check of each level asks of a server on average, and the
profile's ``[costs]`` how fast a server is and how long a start takes."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sm121.core import data_file, profile_fields
from sm121.core.profile import Costs, Profile
from sm121.measure import box, gate, machine
from sm121.measure.plan import Plan
from sm121.run import verdict_file

_NEWEST = 5
#: Seconds at which a run's own pace counts as much as what was expected.
_SETTLED_S = 60.0
_LAST_LOOK = 3
#: Answers of several streams are so much longer than what is measured of them.
_STREAMS_FACTOR = 2


@dataclass(frozen=True)
class Check:
    """A test that a run asks."""

    id: str
    level: str
    #: The fixtures that start a server for it, each of them once in a run.
    servers: frozenset[str] = frozenset()
    can_run: bool = True
    depth: int | None = None
    tokens: int | None = None
    streams: int | None = None


class _Row(data_file.DataTable):
    """What a check of a level asks of a server, on average. Tokens, answers, seconds."""

    prompt: float = 0
    #: So many answers, each as long as the profile's model makes one.
    answers: float = 0
    seconds: float = 0


@dataclass
class Forecast:
    """What the checks of a level cost. Seconds, tokens. ``unable``: those that cannot run here."""

    checks: int = 0
    unable: int = 0
    #: Of them, those that were timed here before, and their time.
    timed: int = 0
    timed_s: float = 0.0
    starts: int = 0
    starts_s: float = 0.0
    prompt: float = 0.0
    prompt_s: float = 0.0
    generated: float = 0.0
    generated_s: float = 0.0
    other_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.timed_s + self.starts_s + self.prompt_s + self.generated_s + self.other_s

    def ask(
        self, costs: Costs, requests: float, prompt: float, tokens: float, *, streams: int = 1
    ) -> None:
        """Add so many requests, ``streams`` at a time, each of a prompt and an answer."""
        self.prompt += requests * prompt
        self.prompt_s += requests * costs.prompt_s(prompt)
        self.generated += requests * tokens
        self.generated_s += requests * tokens * costs.token_s(prompt) / costs.gain(streams)


@dataclass
class Pace:
    """How far a run is, and how long the rest of it takes: what was expected, times what the levels
    that are over have taken of it. `costs`: what was expected of each level."""

    costs: Mapping[str, Forecast]
    level: str = ""
    _over: set[str] = field(default_factory=set)
    _ended: Counter[str] = field(default_factory=Counter)
    #: Of those that ran: how many they are, and their seconds.
    _ran: Counter[str] = field(default_factory=Counter)
    _took: dict[str, float] = field(default_factory=dict)

    def begin(self, level: str) -> None:
        """A level begins, and so the one before it is over."""
        self._over = self._over | {self.level} - {level}
        self.level = level

    def end(self, level: str, seconds: float | None) -> None:
        """A check has ended, after so many seconds; None: it could not run."""
        self._ended[level] += 1
        if seconds is not None:
            self._ran[level] += 1
            self._took[level] = self._took.get(level, 0.0) + seconds

    def ended(self, level: str) -> int:
        """So many checks of a level have ended."""
        return min(self._ended[level], self.costs[level].checks)

    def whole(self, level: str) -> float:
        """Seconds that a level takes; 0 where nothing is known."""
        cost = self.costs[level]
        of_starts, of_rest = self._factors
        return cost.starts_s * of_starts + (cost.seconds - cost.starts_s) * of_rest

    def left(self, running_s: float = 0.0) -> float | None:
        """Seconds to go; None where nothing is known. `running_s`: of the check at hand."""
        if not any(cost.seconds for cost in self.costs.values()):
            return None
        seconds = 0.0
        for level in {*self.costs} - self._over:
            checks = self.costs[level].checks
            each = self.whole(level) / max(checks, 1)
            to_go, running = checks - self.ended(level), level == self.level
            not_begun = max(to_go - running, 0)  # of the level at hand at least their share
            seconds += max(each * to_go - running_s * running, each * not_begun)
        return seconds

    @property
    def _factors(self) -> tuple[float, float]:
        """Of starts and of the rest: a start that was short says nothing of how fast answers are. A
        level's time is divided among both as it was expected."""
        expected, took = [_SETTLED_S, _SETTLED_S], [_SETTLED_S, _SETTLED_S]
        for level in self._over & {*self.costs}:
            cost = self.costs[level]
            share = self._ran[level] / max(cost.checks - cost.unable, 1)
            for part, seconds in enumerate((cost.starts_s, cost.seconds - cost.starts_s)):
                expected[part] += seconds * share
                took[part] += self._took.get(level, 0.0) * seconds / (cost.seconds or 1)
        return took[0] / expected[0], took[1] / expected[1]


@dataclass(frozen=True)
class Timed:
    """Seconds of checks on this machine, by id, and the newest run that says so."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    source: str | None = None
    #: What the machine's memory gave in the newest of them; None where it was not fit.
    gb_s: float | None = None


def timed(report: Path, profile: Profile, plan: str) -> Timed:
    """What the newest runs of a report directory took, of this profile on this machine. A rate is
    measured in another way by another plan: its time is then not taken."""
    by_test: dict[str, float] = {}
    source = gb_s = None
    files = [report / "verdict.json", *(report / "earlier").glob("*/verdict.json")]
    identity = machine.identity()
    newest = sorted(filter(Path.is_file, files), key=os.path.getmtime, reverse=True)
    for file in newest[:_NEWEST]:
        try:
            run = verdict_file.read(file)
        except (OSError, ValueError):
            continue  # not one that can be read: nothing is known of it
        fingerprint = run.fingerprint
        if fingerprint is None or (run.profile, fingerprint.machine) != (profile.name, identity):
            continue
        if run.box.before and run.box.before.device and run.box.state != box.BoxState.DEGRADED:
            gb_s = gb_s or run.box.before.device.bandwidth_best_gb_s
        if fingerprint.configuration != profile.under_test or not run.finished:
            continue
        for test in run.tests:
            if test.executed and (fingerprint.plan == plan or test.level != "performance"):
                source = source or f"{file.parent.name}, {run.started[:10]}"
                by_test.setdefault(test.id, test.seconds)
    return Timed(by_test, source, gb_s)


def of(
    profile: Profile, plan: Plan, checks: Iterable[Check], known: Timed, matrix_s: float = 0.0
) -> dict[str, Forecast]:
    """The cost of each level that has checks which will run, by the profile's rates, the seconds of
    checks that were timed (``known``) and of the matrix's cells."""
    seconds, costs = known.seconds, profile.costs
    every = list(checks)
    forecasts: dict[str, Forecast] = {}
    started = {name for check in every if check.id in seconds for name in check.servers}
    for level in profile_fields.LEVELS:
        whole = [check for check in every if check.level == level]
        if not whole:
            continue
        of_level = [check for check in whole if check.can_run]
        unable = len(whole) - len(of_level)
        forecast = forecasts[level] = Forecast(checks=len(whole), unable=unable)
        rest = [check for check in of_level if check.id not in seconds]
        forecast.timed = len(of_level) - len(rest)
        forecast.timed_s = sum(seconds[check.id] for check in of_level if check.id in seconds)
        if level == "matrix":
            forecast.other_s = matrix_s * len(rest) / max(len(of_level), 1)
        elif costs is not None:
            row = data_file.load_key("costs.toml", "levels", dict[str, _Row]).get(level, _Row())
            seconds_each = costs.kernel_check_s.value if level == "kernel" else row.seconds
            forecast.other_s = len(rest) * seconds_each
            forecast.ask(costs, len(rest), row.prompt, row.answers * costs.answer_tokens.value)
            if level == "performance":
                _cells(forecast, profile, costs, plan, rest)
            if any("::test_short_prompts_join" in check.id for check in rest):
                forecast.other_s += profile.stress.joining_s.value
            starting = {name for check in rest for name in check.servers} - started
            started |= starting
            forecast.starts = len(starting)
            forecast.starts_s = forecast.starts * costs.start_s.value
    return forecasts


def counted(levels: Iterable[str]) -> dict[str, Forecast]:
    """Checks by their levels, where nothing is known of their time."""
    return {level: Forecast(checks=checks) for level, checks in Counter(levels).items()}


def _cells(
    own: Forecast, profile: Profile, costs: Costs, plan: Plan, checks: Sequence[Check]
) -> None:
    """The requests of the cells that checks are read from; several are read from one."""
    measuring = plan.measuring
    first = plan.depths[0]
    rounds: dict[tuple[int, int], int] = {}
    for check in checks:
        if check.depth is None and check.streams is None:
            continue  # it is read from the cells of the others
        depth, streams = check.depth if check.depth is not None else first, check.streams or 1
        needed = measuring.rounds if streams == 1 else measuring.concurrency_rounds
        kind = f"tg{check.tokens}" if check.tokens is not None else f"pp{plan.prompt_tokens}"
        if streams == 1 and profile.gate(f"{kind}@d{depth}") is not None:
            needed = max(needed, gate.STEADY_LOOK) + _LAST_LOOK
        rounds[depth, streams] = max(needed, rounds.get((depth, streams), 0))
    for (depth, streams), count in rounds.items():
        prompt = depth + plan.prompt_tokens
        short = measuring.short_rounds + measuring.warm_up_requests
        tokens = plan.longest if streams == 1 else _STREAMS_FACTOR * min(plan.generated_tokens)
        own.ask(costs, count * streams, prompt, tokens, streams=streams)
        own.ask(costs, short, prompt, plan.shortest)
