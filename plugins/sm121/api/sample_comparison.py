"""Compare one-token samples with their reported log-probabilities."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from sm121.answers.expected_samples import CHANCE, Split, Tally, Top, shares
from sm121.api.client import Json
from sm121.api.sample_source import Samples
from sm121.core.unmet import Fact

#: The requirement of a comparison.
PROMISED = "samples that follow the reported log-probabilities"
#: The number of likeliest tokens whose frequencies are compared individually.
_RANKS = 4

#: Returns which of the listed tokens may be drawn, and which must not be drawn.
Rule = Callable[[Top], Split]


def allow_all(top: Top) -> Split:
    """Return a `Split` in which every listed token may be drawn.

    Args:
        top: The listed tokens, with their log-probabilities.
    """
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
    """Compare one-token samples with their reported log-probabilities.

    Args:
        about: The parameter and the kind of the samples, as text for the facts.
        samples: The samples.
        rule: Returns which tokens may be drawn.
        evidence: The value of the parameter and the prompt, as text for the facts.
        temperature: The temperature of the samples.
        edge: Tokens that a tighter value of the parameter would remove. They are counted together.
        unlisted: Whether tokens that are not listed may also be drawn.

    Returns:
        A fact if a forbidden token was drawn, and a fact for each of the likeliest tokens (or for
        the edge) that was drawn too often or too seldom.
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
            # Sort equally likely tokens by name, because engines list the drawn one first.
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
    """Check that samples with a seed repeat the samples of single requests with the same seed.

    Args:
        alone: One sample per text, from requests sent alone.
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
    return [
        Fact(("the samples of single requests with this seed"), "others", "seed", evidence=evidence)
    ]


class SampleCase(NamedTuple):
    """Requests for one-token samples, and the comparison of the samples."""

    texts: list[str]
    options: Json
    judge: Callable[[Samples], list[Fact]]
