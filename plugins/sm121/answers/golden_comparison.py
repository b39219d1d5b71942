"""Compare the answers of a run with golden answers, and the environments of both runs."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import JsonValue

from sm121.answers.agreement import TokenAgreement
from sm121.core.level_settings import GoldenBound
from sm121.core.unmet import Fact, Unmet, noted, with_subject
from sm121.core.verdict import NotRun

#: Maximum number of characters of a value in a difference of two environments.
_SHOWN = 120


class WorstToken(NamedTuple):
    """The largest difference of a log-probability."""

    prompt: str
    #: The index of the token.
    place: int
    #: The difference in nats.
    error: float


@dataclass(frozen=True)
class GoldenComparison:
    """The comparison of a run with a golden file."""

    #: The agreement of each answer with the golden one. The keys are the names of the prompts.
    agreements: Mapping[str, TokenAgreement]
    #: Differences of the two runs' environments, one line each.
    differences: tuple[str, ...]

    @property
    def mean_divergence(self) -> float:
        """The mean KL divergence over all comparable tokens in nats; NaN if there are none."""
        values: list[float] = []
        for agreed in self.agreements.values():
            values += filter(math.isfinite, agreed.divergences)
        return math.fsum(values) / len(values) if values else math.nan

    @property
    def top1(self) -> float:
        """The fraction of golden tokens that the run also chose; 0 if there are none."""
        values: list[bool] = []
        for agreed in self.agreements.values():
            values += agreed.top1
        return sum(values) / len(values) if values else 0.0

    @property
    def worst(self) -> WorstToken:
        """The largest difference of a log-probability."""
        name, agreed = max(self.agreements.items(), key=lambda item: item[1].max_abs)
        return WorstToken(name, agreed.worst, agreed.max_abs)

    def beyond(self, bound: GoldenBound) -> list[Fact]:
        """Return the differences beyond the tolerance.

        Args:
            bound: The tolerance.

        Returns:
            A fact about the first prompt that differs, and a fact for each mean that exceeds its
            bound.
        """
        facts: list[Fact] = []
        disagreements = []
        for name, agreed in self.agreements.items():
            if agreed.disagreement is not None:
                disagreements += with_subject(f"prompt {name!r}", [agreed.disagreement])
        if disagreements:
            evidence = f"the first of {len(disagreements)} that differ"
            facts += noted(disagreements[:1], evidence)
        if not self.mean_divergence <= bound.mean_divergence:  # true for NaN, too
            facts.append(
                Fact(
                    "a mean KL divergence of at most",
                    value=self.mean_divergence,
                    limit=bound.mean_divergence,
                    unit="nats",
                )
            )
        if self.top1 < bound.top1_at_least:
            facts.append(
                Fact(
                    "of the golden tokens at least",
                    value=100 * self.top1,
                    limit=100 * bound.top1_at_least,
                    unit="%",
                )
            )
        return facts

    def hold(self, bound: GoldenBound, about: str = "") -> None:
        """Raise an error if the run differs by more than the tolerance.

        Args:
            bound: The tolerance.
            about: What the facts are about, for example a configuration.

        Raises:
            Unmet: The run differs.
            NotRun: Tokens after an accepted fork could not be requested.
        """
        facts = self.beyond(bound)
        if facts:
            raise Unmet(*noted(with_subject(about, facts), self.summary()))
        unjudged = sum(agreed.unjudged for agreed in self.agreements.values())
        if unjudged:
            required = "token ids, so that the rest can be requested (return_token_ids)"
            observed = (
                f"{unjudged} tokens were not compared, because they follow a position where two "
                "tokens are equally likely"
            )
            raise NotRun(Fact(required, observed, about, evidence=self.summary()))

    def summary(self) -> str:
        """Return the figures of the comparison in one line."""
        worst = self.worst
        tokens = sum(len(agreed.top1) for agreed in self.agreements.values())
        forks = sum(agreed.forks for agreed in self.agreements.values())
        return (
            f"{len(self.agreements)} prompts, {tokens} tokens: mean KL {self.mean_divergence:.3g} "
            f"nats, top-1 agreement {self.top1:.2%}, worst token {worst.error:.3g} nats "
            f"({worst.prompt}, token {worst.place}), {forks} accepted forks"
        )


def differences(
    before: Mapping[str, JsonValue], now: Mapping[str, JsonValue], prefix: str = ""
) -> list[str]:
    """Compare two reproducibility records.

    Args:
        before: The earlier record.
        now: The record of this run.
        prefix: The keys that lead to these tables, each followed by a dot.

    Returns:
        One line for each difference: ``key: before -> now``.
    """
    lines = []
    for key in sorted({*before, *now}):
        old = before.get(key)
        new = now.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif isinstance(old, list) and isinstance(new, list):
            # Show only the changed entries, because whole lists would be too long to read.
            removed = [entry for entry in old if entry not in new]
            added = [entry for entry in new if entry not in old]
            lines.append(f"{prefix}{key}: {_short(removed)} -> {_short(added)}")
        else:
            lines.append(f"{prefix}{key}: {_short(old)} -> {_short(new)}")
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
