"""Simulate how often a gate decides wrongly, and write the tables of docs/tables/gate-errors.md.

``python -m tools.gate_errors`` takes some minutes; ``--runs 200`` is a quick trial.
"""

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator

from sm121.core.measuring_settings import MeasuringSettings
from sm121.core.profile_fields import Gate
from sm121.core.verdict import Verdict
from sm121.measure import gate
from sm121.measure.metrics.tg import rate_bounds
from sm121.measure.statistics import Floats

PAGE = Path(__file__).parent.parent / "docs" / "tables" / "gate-errors.md"
BEGIN = "<!-- made by tools/gate_errors.py -->\n"
END = "<!-- end -->\n"
THRESHOLD = 52.0
RATE = Gate(metric="tg32@d0", unit="tok/s", minimum=THRESHOLD, source="the plan")
BOUND = MeasuringSettings().maximum_rounds
#: A server's distance from the threshold, and the largest accepted share of wrong decisions.
DISTANCE = 0.01
ALLOWED = 0.02

#: Relative deviations of a number of rounds from their level.
Noise = Callable[[Generator, int], Floats]


def independent(deviation: float) -> Noise:
    """Return a function that draws rounds which are independent of each other.

    Args:
        deviation: The relative standard deviation of a round.
    """
    return lambda generator, count: deviation * generator.standard_normal(count)


def autoregressive(correlation: float, deviation: float) -> Noise:
    """Return a function that draws rounds of an AR(1) process.

    Args:
        correlation: The correlation of each round with the last one.
        deviation: The relative standard deviation of a round.
    """

    def draw(generator: Generator, count: int) -> Floats:
        steps = generator.standard_normal(count)
        values = np.empty(count)
        values[0] = steps[0]
        fresh = np.sqrt(1.0 - correlation**2)
        for at in range(1, count):
            values[at] = correlation * values[at - 1] + fresh * steps[at]
        return deviation * values

    return draw


def two_states(rounds: int, within: float, *, apart: float = 0.04, fixed: bool = True) -> Noise:
    """Return a function that draws rounds of a server that alternates between two states.

    Args:
        rounds: The number of rounds in a state.
        within: The relative standard deviation within a state.
        apart: The relative distance of the states.
        fixed: Whether `rounds` is the exact number; otherwise it is the mean of a random one.
    """

    def draw(generator: Generator, count: int) -> Floats:
        if fixed:
            state = (np.arange(count) + generator.integers(2 * rounds)) // rounds
        else:
            changes = generator.random(count) < 1.0 / rounds
            changes[0] = generator.random() < 0.5
            state = np.cumsum(changes)
        side = np.where(state % 2 == 0, apart / 2, -apart / 2)
        return side + within * generator.standard_normal(count)

    return draw


#: The name, the noise, and whether its share of wrong decisions is limited.
NOISES: tuple[tuple[str, Noise, bool], ...] = (
    ("independent, 0.1 %", independent(0.001), True),
    ("independent, 1 %", independent(0.01), True),
    ("independent, 2 %", independent(0.02), True),
    ("AR(1), φ 0.95, 1 %", autoregressive(0.95, 0.01), True),
    ("AR(1), φ 0.9, 2 %", autoregressive(0.9, 0.02), True),
    ("AR(1), φ 0.8, 2 %", autoregressive(0.8, 0.02), True),
    ("AR(1), φ 0.98, 1 %", autoregressive(0.98, 0.01), True),
    ("AR(1), φ 0.95, 0.3 %", autoregressive(0.95, 0.003), True),
    ("two states 4 % apart, 10 rounds each", two_states(10, 0.001), True),
    ("the same, and 1 % within", two_states(10, 0.01), True),
    ("two states 4 % apart, 10 rounds each on average", two_states(10, 0.001, fixed=False), True),
    ("the same, and 1 % within", two_states(10, 0.01, fixed=False), True),
    ("two states 4 % apart, 5 rounds each", two_states(5, 0.003), True),
    ("two states 4 % apart, 20 rounds each", two_states(20, 0.003), True),
)


@dataclass(frozen=True)
class Slow:
    """Decode rates of a server of which some answers are slow.

    The total rate is below the gate, although the median is above it.
    """

    name: str
    fast: float
    slow: float
    share: float

    @property
    def over_time(self) -> float:
        """Return the tokens per second over the whole time."""
        return 1.0 / ((1.0 - self.share) / self.fast + self.share / self.slow)

    def draw(self, generator: Generator, count: int) -> Floats:
        """Return random decode rates.

        Args:
            generator: The random number generator.
            count: The number of rates.
        """
        slow = generator.random(count) < self.share
        noise = 1.0 + 0.002 * generator.standard_normal(count)
        return np.where(slow, self.slow, self.fast) * noise


SLOW = (
    Slow("one answer in five at half speed", 54.0, 27.0, 0.2),
    Slow("one answer in five at half speed, faster", 60.0, 30.0, 0.2),
    Slow("one answer in four at two thirds", 54.0, 36.0, 0.25),
)


def decide(rates: Floats) -> tuple[Verdict, int]:
    """Decide as a run does: look at more rounds until the gate decides.

    Args:
        rates: The rates of all rounds, in tok/s; at least `BOUND`.

    Returns:
        The verdict, and the number of rounds that it needed.
    """
    at = gate.FIRST_LOOK
    while True:
        decision = gate.decide(rates[:at].tolist(), RATE, maximum_rounds=BOUND)
        if decision is not None:
            return decision.verdict, at
        at = gate.next_look(at, BOUND)


def simulate(draw: Callable[[Generator], Floats], runs: int, seed: int) -> Counter[Verdict]:
    """Return the verdicts of many simulated runs.

    Args:
        draw: Draws the rates of one run.
        runs: The number of runs.
        seed: The seed of the random number generator.
    """
    generator = np.random.default_rng(seed)
    return Counter(decide(draw(generator))[0] for _ in range(runs))


def at_distance(noise: Noise, distance: float, runs: int, seed: int = 14) -> Counter[Verdict]:
    """Return the verdicts on a server near the threshold.

    Args:
        noise: Draws the relative deviations of the rounds.
        distance: The distance of the rate from the threshold, as a fraction. Negative: below it.
        runs: The number of runs.
        seed: The seed of the random number generator.
    """
    level = THRESHOLD * (1.0 + distance)
    return simulate(lambda generator: level * (1.0 + noise(generator, BOUND)), runs, seed)


# Rounds that are dropped because the client was late for one of their timestamps.


@dataclass(frozen=True)
class Lateness:
    """The delays of a client, which are exponentially distributed.

    Attributes:
        chance: The probability of a delay, by the duration of an answer in seconds and whether it
            is slow.
    """

    name: str
    chance: Callable[[float, bool], float]
    mean_s: float = 0.02


LATENESS = (
    Lateness("of any answer", lambda _seconds, _slow: 0.15),
    Lateness("the longer, the more", lambda seconds, _slow: 0.25 * seconds),
    Lateness("of slow answers only", lambda _seconds, slow: 0.9 if slow else 0.0),
    Lateness("of fast answers only", lambda _seconds, slow: 0.0 if slow else 0.3),
)
#: The fraction by which slow answers are slower.
SLOWER = 0.10
_GAPS = 31


def left_out(
    lateness: Lateness, level: float, slow_share: float, runs: int, *, count_them: bool
) -> Counter[Verdict]:
    """Return the verdicts if late rounds are dropped, or counted with the bounds of their rates.

    Args:
        level: The number of tokens divided by the time.
        slow_share: The share of slow answers.
    """
    generator = np.random.default_rng(6)
    fast = level * (1.0 - slow_share + slow_share / (1.0 - SLOWER))
    found: Counter[Verdict] = Counter()
    for _ in range(runs):
        kept: list[float] = []
        late: list[tuple[float, float]] = []
        at = gate.FIRST_LOOK
        while True:
            while len(kept) < at and len(late) <= 2 * at:
                slow = bool(generator.random() < slow_share)
                rate = fast * (1.0 - SLOWER * slow) * (1.0 + 0.003 * generator.standard_normal())
                window = _GAPS / rate
                lag = 0.0
                if generator.random() < lateness.chance(window, slow):
                    lag = float(generator.exponential(lateness.mean_s))
                first = bool(generator.random() < 0.5)
                seen = 1.0
                if lag < window:
                    seen = _GAPS / (window - lag if first else window + lag)
                if lag > MeasuringSettings().client_lag_bound * window:
                    if first:
                        lags = (0, int(lag * 1e9), 0)
                    else:
                        lags = (0, 0, int(lag * 1e9))
                    late.append(rate_bounds(seen, _GAPS, lags))
                else:
                    kept.append(seen)
            used = late if count_them else []
            decision = gate.decide(kept, RATE, maximum_rounds=BOUND, left_out=used)
            if decision is not None or len(kept) < at:
                found[decision.verdict if decision else Verdict.INVALID] += 1
                break
            at = gate.next_look(at, BOUND)
    return found


def tables(runs: int) -> str:
    """Return the tables of the page.

    Args:
        runs: The number of simulated runs of each row.
    """
    below = f"{-100 * DISTANCE:.0f} %"
    above = f"+{100 * DISTANCE:.0f} %"
    lines = [
        f"{runs} runs each, {BOUND} rounds at most. A server is {100 * DISTANCE:.0f} % below the "
        "gate, or above it.",
        "",
        f"| noise of the rounds | {below}: PASS, wrong | {below}: FAIL | {above}: FAIL, wrong | "
        f"{above}: PASS | at the gate: PASS, FAIL |",
        "|---|---|---|---|---|---|",
    ]

    def share(found: Counter[Verdict], verdict: Verdict) -> str:
        return f"{100 * found[verdict] / runs:.1f} %"

    for name, noise, _ in NOISES:
        low, high, middle = (at_distance(noise, d, runs) for d in (-DISTANCE, DISTANCE, 0.0))
        lines.append(
            f"| {name} | {share(low, Verdict.PASS)} | {share(low, Verdict.FAIL)} | "
            f"{share(high, Verdict.FAIL)} | {share(high, Verdict.PASS)} | "
            f"{share(middle, Verdict.PASS)}, {share(middle, Verdict.FAIL)} |"
        )
    lines += ["", "What is not decided is INCONCLUSIVE.", ""]
    lines += [
        "| some answers are slow | median | over the time | PASS, wrong |",
        "|---|---|---|---|",
    ]
    for slow in SLOW:
        found = simulate(functools.partial(slow.draw, count=BOUND), runs, 14)
        lines.append(
            f"| {slow.name} | {slow.fast:g} | {slow.over_time:.1f} | {share(found, Verdict.PASS)} |"
        )
    lines += [
        "",
        "Rounds that the client was late for are left out. Of a server some answers are "
        f"{100 * SLOWER:.0f} % slower; over the time it is {100 * DISTANCE:.0f} % below the gate, "
        "or above.",
        "",
        f"| the client is late | slow answers | {below}: PASS, wrong; were they forgotten | "
        f"{above}: FAIL, wrong; were they forgotten |",
        "|---|---|---|---|",
    ]
    for lateness in LATENESS:
        for slow_share in (0.0, 0.3):
            cells = []
            for distance, wrong in ((-DISTANCE, Verdict.PASS), (DISTANCE, Verdict.FAIL)):
                level = THRESHOLD * (1.0 + distance)
                both = (
                    share(left_out(lateness, level, slow_share, runs, count_them=count), wrong)
                    for count in (True, False)
                )
                cells.append("; ".join(both))
            lines.append(f"| {lateness.name} | {slow_share:.0%} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    page = options.output.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    options.output.write_text(f"{before}{BEGIN}\n{tables(options.runs)}\n{END}{after}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
