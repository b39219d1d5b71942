"""Compare two greedy runs of a prompt token by token, within the noise of the arithmetic.

Greedy decoding is discontinuous. If two tokens are equally likely within the noise, either may be
chosen, and the texts differ from there on, although nothing is wrong. Therefore a different token
(a fork) is accepted if both runs report both tokens as equally likely within the bound. To judge
the tokens after a fork, another request continues after the accepted token. Every other difference
is a disagreement.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from sm121.client.completion_json import Completion, Position, ids_of
from sm121.core.level_settings import AgreementBound
from sm121.core.unmet import Fact

#: The maximum number of forks in one answer. Rounding does not cause more.
MOST_FORKS = 6
#: Float32 probabilities sum to 1 within this error; a smaller remainder counts as 0.
_REST = 1e-6

_Token = TypeVar("_Token", str, int)
Positions = Sequence[Position]
#: A function that sends the prompt, followed by the given token ids of the judged run, and returns
#: the tokens that the server generates next. It returns None if the engine does not accept token
#: ids.
Resume = Callable[[tuple[int, ...]], Positions | None]


@dataclass(frozen=True)
class TokenAgreement:
    """The result of comparing one run with another, over the tokens that could be judged."""

    #: The largest difference of a log-probability at each position, in nats.
    errors: tuple[float, ...]
    #: Whether the other run chose the same token at each position.
    top1: tuple[bool, ...]
    #: The KL divergence of the listed tokens at each position (`divergence`).
    divergences: tuple[float, ...]
    #: The number of accepted forks: positions where the runs chose different tokens whose
    #: log-probabilities are almost equal.
    forks: int
    #: The first disagreement; None if the runs agree.
    disagreement: Fact | None
    #: The number of tokens after a fork that could not be compared, because the engine accepts no
    #: token ids.
    unjudged: int = 0

    @property
    def worst(self) -> int:
        """The position of the largest difference; 0 if there are no positions."""
        return max(range(len(self.errors)), key=self.errors.__getitem__, default=0)

    @property
    def max_abs(self) -> float:
        """The largest difference in nats; 0 if there are no positions."""
        return self.errors[self.worst] if self.errors else 0.0

    @property
    def mean_abs(self) -> float:
        """The mean difference in nats; 0 if there are no positions."""
        return math.fsum(self.errors) / len(self.errors) if self.errors else 0.0


def compare_runs(
    judged: Positions, other: Positions, bound: AgreementBound, resume: Resume | None = None
) -> TokenAgreement:
    """Compare two runs of the same prompt token by token, including where they end.

    Args:
        judged: The tokens of the run.
        other: The tokens of the other run.
        bound: The tolerance.
        resume: After an accepted fork, requests the continuation of the judged run's tokens.

    Returns:
        The comparison, with the first disagreement.
    """
    walk = _walk(judged, other, bound, resume)
    errors = []
    top1 = []
    divergences = []
    for mine, theirs in walk.pairs:
        errors.append(_largest_error(mine, theirs))
        top1.append(mine.token == theirs.token)
        divergences.append(divergence(_listed(mine), _listed(theirs)))
    agreement = TokenAgreement(
        errors=tuple(errors),
        top1=tuple(top1),
        divergences=tuple(divergences),
        forks=walk.forks,
        disagreement=walk.disagreement,
        unjudged=walk.unjudged,
    )
    if walk.disagreement is None and agreement.mean_abs > bound.mean_abs:
        fact = Fact(
            "a mean difference of at most",
            about=f"{len(walk.pairs)} tokens",
            value=agreement.mean_abs,
            limit=bound.mean_abs,
            unit="nats",
            evidence=f"worst at token {agreement.worst}",
        )
        return replace(agreement, disagreement=fact)
    return agreement


@dataclass
class _Walk:
    """The state of a comparison of two runs: the compared tokens, the forks, the disagreement."""

    pairs: list[tuple[Position, Position]] = field(default_factory=list)
    forks: int = 0
    disagreement: Fact | None = None
    unjudged: int = 0


def _walk(
    judged: Positions, other: Positions, bound: AgreementBound, resume: Resume | None
) -> _Walk:
    """Compare the runs up to the first disagreement, or to the last token that can be judged."""
    walk = _Walk()
    offset = 0  # the position in the judged run at which the other run's tokens begin
    for position, mine in enumerate(judged):
        about = f"token {position}"
        if position - offset >= len(other):
            walk.disagreement = Fact(mine.token, "the end of the answer", about)
            return walk
        theirs = other[position - offset]
        walk.pairs.append((mine, theirs))
        is_last = position + 1 == len(judged)
        if mine.token != theirs.token:
            gap = _gap(mine, theirs)
            if gap <= bound.fork:
                walk.forks += 1
            walk.disagreement = _fork_fault(mine, theirs, gap, bound, walk.forks, about)
            if walk.disagreement is not None:
                return walk
            if not is_last:
                rest = _resumed(judged[: position + 1], resume)
                if rest is None:
                    walk.unjudged = len(judged) - position - 1
                    return walk
                other = rest
                offset = position + 1
        walk.disagreement = _difference_fault(mine, theirs, bound, about)
        if walk.disagreement is not None:
            return walk
    if len(other) > len(judged) - offset:
        following = other[len(judged) - offset].token
        walk.disagreement = Fact("the end of the answer", following, f"token {len(judged)}")
    return walk


def _resumed(prefix: Positions, resume: Resume | None) -> Positions | None:
    """Request the tokens that follow a prefix of the judged run."""
    ids = ids_of(prefix)
    if resume is None or ids is None:
        return None
    return resume(ids)


def _difference_fault(
    mine: Position, other: Position, bound: AgreementBound, about: str
) -> Fact | None:
    """Return a fact if a log-probability differs by more than the bound."""
    error = _largest_error(mine, other)
    if error <= bound.max_abs:  # false for NaN, too
        return None
    log_probability = other.top.get(mine.token, other.log_probability)
    return Fact(
        "log-probabilities of the likeliest tokens that differ by at most",
        about=f"{about} ({mine.token})",
        value=error,
        limit=bound.max_abs,
        unit="nats",
        evidence=f"{mine.log_probability:.6g} and {log_probability:.6g}",
    )


def _fork_fault(
    mine: Position, other: Position, gap: float, bound: AgreementBound, forks: int, about: str
) -> Fact | None:
    """Return a fact if different tokens are not equally likely, or if there are too many forks."""
    if gap > bound.fork:
        evidence = (
            f"log-probabilities that differ by {gap:.3g} nats; up to {bound.fork:g} nats, both "
            "tokens count as equally likely"
        )
        return Fact(mine.token, other.token, about, evidence=evidence)
    if forks > MOST_FORKS:
        required = f"{MOST_FORKS} positions where the runs choose different tokens, at most"
        return Fact(required, f"{forks}", about)
    return None


def same_tokens(judged: Completion, other: Completion) -> Fact | None:
    """Compare the tokens of two answers, by their ids if both have them, else by their text.

    Args:
        judged: The answer.
        other: The expected answer.

    Returns:
        The first difference; None if there is none.
    """
    if judged.ids is None or other.ids is None:
        if judged.text == other.text:
            return None
        return Fact(f"the text {judged.text!r}", f"{other.text!r}")
    if judged.ids == other.ids:
        return None
    place = 0
    for one, another in zip(judged.ids, other.ids, strict=False):
        if one != another:
            break
        place += 1
    return Fact(_token_at(judged.ids, place), _token_at(other.ids, place), f"token {place}")


def divergence(p: Mapping[_Token, float], q: Mapping[_Token, float]) -> float:
    """Return KL(p || q) over the tokens that both runs list, and one class of all other tokens.

    Engines list only the likeliest tokens. Because merging classes never increases a divergence,
    the result is a lower bound of the divergence over all tokens.

    Args:
        p: Log-probabilities of tokens.
        q: Log-probabilities of tokens in the other run.

    Returns:
        The divergence in nats; NaN if the runs have no common token.
    """
    common = [token for token in p if token in q]
    if not common:
        return math.nan
    ours = [math.exp(p[token]) for token in common]
    theirs = [math.exp(q[token]) for token in common]
    terms = []
    for mine, other in zip(ours, theirs, strict=True):
        if mine > 0.0 and other > 0.0:
            terms.append(mine * math.log(mine / other))
    total = math.fsum(terms)
    our_rest = max(0.0, 1.0 - math.fsum(ours))
    their_rest = max(0.0, 1.0 - math.fsum(theirs))
    if our_rest > _REST:
        total += our_rest * math.log(our_rest / max(their_rest, _REST))
    return max(0.0, total)


def _largest_error(mine: Position, other: Position) -> float:
    """Return the largest difference over all tokens that both runs list at a position.

    All listed tokens count, because if the model is sure of the chosen token, only the
    log-probabilities of other tokens change noticeably. The result is infinite if the other run
    does not list the chosen token, or if a value is not finite.
    """
    ours = _listed(mine)
    theirs = _listed(other)
    if mine.token not in theirs:
        return math.inf
    errors = [abs(ours[token] - theirs[token]) for token in ours.keys() & theirs]
    if not all(map(math.isfinite, errors)):
        return math.inf
    return max(errors)


def _listed(position: Position) -> dict[str, float]:
    """Return the listed tokens of a position, including the chosen token."""
    return {**position.top, position.token: position.log_probability}


def _gap(mine: Position, other: Position) -> float:
    """Return how strongly the runs prefer different tokens, in nats.

    The preference of a run is the log-probability of its own token minus that of the other run's
    token. The larger one of the two preferences is returned.
    """
    mine_by_other = other.top.get(mine.token)
    other_by_mine = mine.top.get(other.token)
    if mine_by_other is None or other_by_mine is None:
        return math.inf
    gap = max(mine.log_probability - other_by_mine, other.log_probability - mine_by_other)
    return gap if math.isfinite(gap) else math.inf


def _token_at(ids: Sequence[int], place: int) -> str:
    return str(ids[place]) if place < len(ids) else "the end"
