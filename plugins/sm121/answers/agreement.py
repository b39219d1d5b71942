"""Do two greedy runs of one prompt agree? Token by token, the noise of the arithmetic allowed for.
Greedy decoding is discontinuous: where two tokens are as likely as each other within the noise,
either may be chosen, and from there on the texts differ without anything being wrong. So a
difference of tokens is accepted where both runs hold both tokens for equally likely, within the
bound; what follows is judged anew from the accepted token, by asking again. Everything else is a
disagreement."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sm121.client.completions import Completion, Position, ids_of
from sm121.core.level_settings import AgreementBound
from sm121.core.unmet import Fact

#: More forks than this in one answer are no accident of rounding.
MOST_FORKS = 6

_Token = TypeVar("_Token", str, int)
Positions = Sequence[Position]
Resume = Callable[[tuple[int, ...]], Positions | None]


@dataclass(frozen=True)
class TokenAgreement:
    """How one run compares with another, over the tokens that were judged."""

    errors: tuple[float, ...]
    """Largest difference of a log-probability at each place."""
    top1: tuple[bool, ...]
    """Whether the other run chose the same token at each place."""
    divergences: tuple[float, ...]
    """KL divergence of the most likely tokens at each place (`divergence`)."""
    forks: int
    """Places where the runs chose differently, both rightly."""
    disagreement: Fact | None
    """What is wrong, None when the runs agree."""
    unjudged: int = 0
    """Tokens after a fork that could not be asked for again (the engine takes no token ids)."""

    @property
    def worst(self) -> int:
        """The place of the largest difference."""
        return max(range(len(self.errors)), key=self.errors.__getitem__, default=0)

    @property
    def max_abs(self) -> float:
        """The largest difference."""
        return self.errors[self.worst] if self.errors else 0.0

    @property
    def mean_abs(self) -> float:
        """The mean difference."""
        return math.fsum(self.errors) / len(self.errors) if self.errors else 0.0


def judge(
    judged: Positions, other: Positions, bound: AgreementBound, resume: Resume | None = None
) -> TokenAgreement:
    """Check each token of `judged` under another run of the same prompt, and that both end there.
    `resume`: gives the other run's tokens after the prompt and the ids of some tokens of `judged`,
    or None where that cannot be asked. Only called after an accepted fork."""
    pairs: list[tuple[Position, Position]] = []
    wrong: Fact | None = None
    unjudged = forks = offset = 0
    for position, mine in enumerate(judged):
        about = f"token {position}"
        if position - offset >= len(other):
            wrong = Fact(mine.token, "the end of the answer", about)
            break
        counterpart = other[position - offset]
        pairs.append((mine, counterpart))
        if mine.token != counterpart.token:
            gap = _gap(mine, counterpart)
            forks += gap <= bound.fork
            if (wrong := _wrong_fork(mine, counterpart, gap, bound, forks, about)) is not None:
                break
            if position + 1 < len(judged):
                ids = ids_of(judged[: position + 1])
                again = resume(ids) if resume is not None and ids is not None else None
                if again is None:
                    unjudged = len(judged) - position - 1
                else:
                    other, offset = again, position + 1
        if not unjudged:
            wrong = _too_far(mine, counterpart, bound, about)
        if unjudged or wrong is not None:
            break
    if wrong is None and not unjudged and len(other) > len(judged) - offset:
        following = other[len(judged) - offset].token
        wrong = Fact("the end of the answer", following, f"token {len(judged)}")
    whole = TokenAgreement(
        tuple(itertools.starmap(_under, pairs)),
        tuple(a.token == b.token for a, b in pairs),
        tuple(divergence(_told(a), _told(b)) for a, b in pairs),
        forks, wrong, unjudged,
    )  # fmt: skip
    if wrong is None and whole.mean_abs > bound.mean_abs:
        wrong = Fact(
            "a mean difference of at most",
            about=f"{len(pairs)} tokens",
            value=whole.mean_abs,
            limit=bound.mean_abs,
            unit="nats",
            evidence=f"worst at token {whole.worst}",
        )
    return replace(whole, disagreement=wrong)


def _too_far(mine: Position, other: Position, bound: AgreementBound, about: str) -> Fact | None:
    error = _under(mine, other)
    if error <= bound.max_abs:  # NaN is no agreement either
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


def _wrong_fork(
    mine: Position, other: Position, gap: float, bound: AgreementBound, forks: int, about: str
) -> Fact | None:
    if gap > bound.fork:
        apart = f"they differ by {gap:.3g} nats, equally likely is up to {bound.fork:g}"
        return Fact(mine.token, other.token, about, evidence=apart)
    if forks > MOST_FORKS:
        most = f"{MOST_FORKS} places where the runs choose differently, at most"
        return Fact(most, f"{forks}", about)
    return None


def same_tokens(judged: Completion, other: Completion) -> Fact | None:
    """What differs between the tokens of two answers (ids where there are any, else the text)."""
    if judged.ids is not None and other.ids is not None:
        if judged.ids == other.ids:
            return None
        pairs = zip(judged.ids, other.ids, strict=False)
        position = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return Fact(_at(judged.ids, position), _at(other.ids, position), f"token {position}")
    if judged.text == other.text:
        return None
    return Fact(f"the text {judged.text!r}", f"{other.text!r}")


def divergence(p: Mapping[_Token, float], q: Mapping[_Token, float]) -> float:
    """KL(p || q) over what both name and one class for all else: at most the whole divergence. The
    engines tell the most likely tokens only; the classes are the tokens that both tell, and the
    rest. Coarser classes can only make the divergence smaller. NaN without common tokens."""
    if not (common := [token for token in p if token in q]):
        return math.nan
    shares = [(math.exp(p[token]), math.exp(q[token])) for token in common]
    rest = tuple(max(0.0, 1.0 - math.fsum(pair[n] for pair in shares)) for n in (0, 1))
    total = math.fsum(a * math.log(a / b) for a, b in shares if a > 0.0 and b > 0.0)
    # Float32 probabilities sum to 1 within 1e-6: a rest below that is no rest.
    if rest[0] > 1e-6:
        total += rest[0] * math.log(rest[0] / max(rest[1], 1e-6))
    return max(0.0, total)


def _under(mine: Position, other: Position) -> float:
    """Largest |difference| at one place; infinite where my token is not told or one is NaN. Of all
    tokens that both runs tell: the chosen one's own log-probability hardly moves where the model is
    sure of it, while the others' still do."""
    mine_told, theirs_told = _told(mine), _told(other)
    if mine.token not in theirs_told:
        return math.inf
    errors = [
        abs(mine_told[token] - theirs_told[token]) for token in mine_told.keys() & theirs_told
    ]
    return max(errors) if all(math.isfinite(error) for error in errors) else math.inf


def _told(position: Position) -> dict[str, float]:
    """The tokens of a place, the chosen one among them also where an engine lists no others."""
    return {**position.top, position.token: position.log_probability}


def _gap(mine: Position, other: Position) -> float:
    """How much more likely each run holds its own choice than the other's; the larger of both."""
    mine_under_theirs, theirs_under_mine = other.top.get(mine.token), mine.top.get(other.token)
    if mine_under_theirs is None or theirs_under_mine is None:
        return math.inf
    gap = max(mine.log_probability - theirs_under_mine, other.log_probability - mine_under_theirs)
    return gap if math.isfinite(gap) else math.inf


def _at(ids: Sequence[int], place: int) -> str:
    return str(ids[place]) if place < len(ids) else "the end"
