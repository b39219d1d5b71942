"""Comparisons of samples of one token with what their log-probabilities promise."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from sm121.answers.promised import CHANCE, Split, Tally, Top, shares
from sm121.api.client import Json
from sm121.api.sample_source import Samples
from sm121.core.unmet import Fact

#: The requirement of a comparison.
PROMISED = "samples as the reported log-probabilities promise"
#: The number of likeliest tokens that are counted one by one.
_RANKS = 4

#: Returns which of the listed tokens may be drawn, and which must not.
Rule = Callable[[Top], Split]


def allow_all(top: Top) -> Split:
    """The rule by which each listed token may be drawn."""
    return Split(set(top), set())


def compare_samples(
    about: str,
    samples: Samples,
    rule: Rule,
    evidence: str,
    temperature: float = 1.0,
    *,
    edge: Collection[str] = (),
    unlisted: bool = True,
) -> list[Fact]:
    """Compare samples of one token with their log-probabilities.

    Args:
        about: The subject of the facts.
        samples: The samples.
        rule: Which tokens may be drawn.
        evidence: The value of the parameter and the text.
        temperature: The temperature of the samples.
        edge: Tokens that a tighter value of the parameter would cut off; counted together.
        unlisted: Tokens that are not listed may be drawn.

    Returns:
        Facts of tokens that must not be drawn, and of each of the likeliest tokens, or of the edge,
        that was drawn too often or too seldom.
    """
    tallies = {f"rank {rank + 1}": Tally() for rank in range(_RANKS)}
    of_edge = Tally()
    banned = None
    for (position,) in samples:
        token = position.token
        remaining, dropped = rule(position.top)
        if token in remaining:
            allowed = {name: position.top[name] for name in remaining}
            probabilities = shares(allowed, temperature)
            # Equally likely tokens by name: an engine lists the drawn one first.
            ordered = sorted(probabilities, key=lambda name: (-probabilities[name], name))
            for tally, name in zip(tallies.values(), ordered[:_RANKS], strict=False):
                tally.add(token == name, probabilities[name])
            edge_share = sum(probabilities.get(name, 0.0) for name in edge)
            of_edge.add(token in edge, edge_share)
        elif token in dropped or (token not in position.top and not unlisted):
            banned = token
    facts = []
    if banned is not None:
        facts.append(Fact(PROMISED, "others", f"{about}, others", evidence=f"{evidence}: {banned}"))
    for name, tally in [*tallies.items(), ("edge", of_edge)]:
        if tally.chance < CHANCE:
            text = f"{evidence}: {tally}"
            facts.append(Fact(PROMISED, "others", f"{about}, {name}", evidence=text))
    return facts


def compare_repeated(alone: Samples, samples: Samples) -> list[Fact]:
    """Compare samples of a seed with those that the seed gave alone.

    Args:
        alone: One sample after each text.
        samples: Samples after the same texts, any number of times.

    Returns:
        A fact if more than half of the samples differ.
    """
    differences = []
    for index, (position,) in enumerate(samples):
        expected = alone[index % len(alone)][0].token
        if position.token != expected:
            differences.append(f"{position.token} in place of {expected}")
    if 2 * len(differences) <= len(samples):
        return []
    evidence = f"{len(differences)} of {len(samples)}, {differences[0]}"
    return [Fact("the samples that the seed gave alone", "others", "seed", evidence=evidence)]


class Case(NamedTuple):
    """Requests for samples of one token, and the comparison of their samples."""

    texts: list[str]
    options: Json
    judge: Callable[[Samples], list[Fact]]
