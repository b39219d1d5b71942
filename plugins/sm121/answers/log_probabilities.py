"""Compare the server's log-probabilities with the oracle's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sm121.answers import oracle_texts
from sm121.answers.mistake_pattern import Pattern
from sm121.answers.oracle_file import OraclePosition, Scored
from sm121.answers.oracle_tolerance import OracleReference, compare
from sm121.client.completion_json import Position, id_of, name_of
from sm121.client.completions import Asker, Request
from sm121.core.level_settings import LogProbabilityTolerance
from sm121.core.unmet import Fact, Unmet, require, with_subject
from sm121.core.verdict import Inapplicable, NotRun

#: The margin for the mean over generated tokens. It is larger than the margins in
#: `oracle_tolerance`, because there are few generated tokens.
_MARGIN_OF_GENERATED = 1.5
#: The suite tests for a mistake only if rounding alone is unlikely to look like it. The share of
#: the mistake in the log-probabilities is fitted (0: absent, 1: present); this many standard
#: deviations that rounding causes in the share must be less than 0.5. The number is large, because
#: the errors of adjacent tokens are correlated; a correct vLLM with gpt-oss's width reached six.
_SIGMAS = 6.0
#: If the fitted share of a mistake is at least this value, the mistake is present.
_HALF = 0.5
#: For an engine that does not round its arithmetic: a share of at least this value shows another
#: rounding, and a share that is this far below 0 or above 1 shows another mistake.
_ANY_SHARE = 0.1


class GenerationJudgement(NamedTuple):
    """The result of comparing generated tokens with the oracle's."""

    #: The differences beyond the tolerance.
    facts: list[Fact]
    #: The number of compared positions.
    judged: int


def generation_beyond(
    tolerance: LogProbabilityTolerance,
    right: Scored,
    generated: Sequence[int],
    positions: Sequence[Position],
) -> GenerationJudgement:
    """Compare greedy tokens and their log-probabilities with those of the oracle.

    The chosen token may be less likely than the best one by at most two tolerances. Nothing is
    compared after the first different token, because the oracle continued with its own choice.

    Args:
        tolerance: The tolerance of a log-probability.
        right: The oracle's tokens.
        generated: The ids of the server's tokens.
        positions: The server's tokens with their log-probabilities.
    """
    observed: list[float] = []
    expected: list[float] = []
    judged = 0
    rows = zip(right.generated_places, right.generated, generated, positions, strict=False)
    for place, best, token, position in rows:
        about = f"token {judged}"
        fault = _choice_fault(tolerance, place, best, token, about)
        if fault is not None:
            return GenerationJudgement([fault], judged)
        by_id = dict(zip(place.ids, place.values, strict=True))
        limit = place.values[-1] + tolerance.max_abs
        for other, value in _listed(token, position):
            if other in by_id:
                observed.append(value)
                expected.append(by_id[other])
            elif value > limit:
                required = f"a log-probability of token {other} of at most"
                fault = Fact(required, "", about, value=value, limit=limit, unit="nats")
                return GenerationJudgement([fault], judged)
        judged += 1
        if token != best:
            break
    if not observed:
        return GenerationJudgement([Fact("log-probabilities")], judged)
    # Do not compare means, because their tolerances are for prompts, whose tokens are likelier.
    beyond = compare(observed, expected).beyond(tolerance, means=False)
    return GenerationJudgement(with_subject(f"{len(observed)} log-probabilities", beyond), judged)


def _choice_fault(
    tolerance: LogProbabilityTolerance, place: OraclePosition, best: int, token: int, about: str
) -> Fact | None:
    """Return a fact if the chosen token is less likely than the best one by two tolerances."""
    by_id = dict(zip(place.ids, place.values, strict=True))
    is_listed = token in by_id
    behind = place.values[0] - by_id.get(token, place.values[-1])
    limit = tolerance.likely_max_abs or tolerance.max_abs
    is_unknown = not is_listed and token != best
    if not behind > 2 * limit and not is_unknown:
        return None
    at_least = "" if is_listed else "at least "
    evidence = f"{at_least}{behind:.3g} nats less likely"
    return Fact(f"the most likely token {best}", f"{token}", about, evidence=evidence)


def _listed(token: int, position: Position) -> Iterator[tuple[int, float]]:
    """Yield the ids and log-probabilities that the engine sends for a position."""
    for name, value in {**position.top, name_of(token): position.log_probability}.items():
        token_id = id_of(name)
        if token_id is not None:
            yield token_id, value


def prompts_agree(asker: Asker, reference: OracleReference) -> str:
    """Require that the log-probabilities of fixed prompts agree with the oracle's.

    Args:
        asker: The client of the server.
        reference: The oracle and the tolerance. The prompts of its file are compared.

    Returns:
        A description of the differences.

    Raises:
        Unmet: A prompt, or the prompts together, differ by more than the tolerance.
        NotRun: The engine sends no log-probabilities of a prompt.
    """
    observed: list[float] = []
    expected: list[float] = []
    tolerance = reference.tolerance
    for name, ids in oracle_texts.prompts():
        if name not in reference.file.prompts:
            continue
        values = _of_prompt(asker, ids)
        right = reference.file.prompts[name].following
        difference = compare(values, right)
        require(
            difference.max_abs <= tolerance.max_abs,
            "|difference| at most",
            f"at token {difference.worst_position}",
            f"prompt {name} ({len(ids)} tokens, {reference.dtype})",
            value=difference.max_abs,
            limit=tolerance.max_abs,
            unit="nats",
        )
        observed += values
        expected += right
    whole = compare(observed, expected)
    beyond = whole.beyond(tolerance)
    if beyond:
        raise Unmet(*with_subject(f"{len(observed)} tokens, {reference.dtype}", beyond))
    return (
        f"{len(observed)} tokens, {reference.dtype}: off by {whole.mean_abs:.2g} nats on average "
        f"({tolerance.mean_abs:.2g} allowed), {whole.max_abs:.2g} at most ({tolerance.max_abs:.2g})"
    )


def mistake_is_absent(asker: Asker, reference: OracleReference, mistake: str) -> None:
    """Require that the server's answers are closer to gpt-oss than to gpt-oss with a small mistake.

    Args:
        asker: The client of the server.
        reference: The oracle and the tolerance.
        mistake: One of `SMALL_MISTAKES`.

    Raises:
        Unmet: The answers are closer to the mistake. They are fitted as a mixture of the right
            model (0) and the mistaken model (1). If the fitted share is below 0 or above 1 by more
            than rounding explains, and a log-probability differs by more than the tolerance, the
            message reports that there is another mistake.
        NotRun: The engine does not return log-probabilities of a prompt, or rounding alone can
            cause half of the mistake's pattern.
    """
    pattern = Pattern.of(reference.file, mistake, reference.rounding)
    noise = pattern.noise()
    if not _SIGMAS * noise < _HALF:
        raise NotRun(
            f"{mistake} cannot be distinguished from rounding on this checkpoint: rounding alone "
            f"can cause up to {_SIGMAS * noise:.2g} of the mistake's effect. Run the engine in "
            "float32"
        )
    observed = _of_prompts(asker, oracle_texts.SMALL_MISTAKES[mistake].prompts)
    share = pattern.share(observed)
    differs = compare(observed, pattern.right).max_abs > reference.tolerance.max_abs
    margin = max(_SIGMAS * noise, _ANY_SHARE)
    outside = share < -margin or share > 1 + margin
    other = "which shows another mistake" if differs and outside else ""
    required = "a share of this mistake (0: as gpt-oss, 1: as the mistake) between -0.5 and"
    require(abs(share) < _HALF, required, other, mistake, value=share, limit=_HALF)


def roundings_are_absent(asker: Asker, reference: OracleReference) -> str:
    """Require that the server rounds each part of the model as expected, and not in another way.

    Other ways are the checkpoint's own format, and another rounding rule of the same format.

    Args:
        asker: The client of the server.
        reference: The oracle and the tolerance.

    Returns:
        A text with the number of other ways that were excluded, and those that cannot be
        distinguished.

    Raises:
        Unmet: The server rounds in another way. The first fact has the way that explains most of
            the differences.
        Inapplicable: The server does not round more than the checkpoint.
        NotRun: The engine sends no log-probabilities of a prompt, or no other way can be
            distinguished from the rounding of its arithmetic.
    """
    others = reference.file.other_roundings
    if not others:
        raise Inapplicable("the server rounds nothing beyond the checkpoint")
    # If activations are rounded to few bits, this rounding amplifies the errors of float32
    # arithmetic, so small shares prove nothing.
    decides = reference.rounding is not None or "float32" in reference.file.rounded
    limit = _HALF if decides else _ANY_SHARE
    clear: dict[str, Pattern] = {}
    hidden = []
    for name in others:
        pattern = Pattern.of(reference.file, name, reference.rounding)
        if _SIGMAS * pattern.noise() < limit:
            clear[name] = pattern
        else:
            hidden.append(name)
    if not clear:
        raise NotRun(
            f"none of {', '.join(others)} can be distinguished from rounding on this checkpoint"
        )
    observed = _of_prompts(asker, oracle_texts.ROUNDING_PROMPTS)
    shares = {}
    for name, pattern in clear.items():
        share = pattern.share(observed)
        if not abs(share) < limit:
            shares[name] = share
    if shares:
        required = f"rounding as {reference.file.rounding}, and a share of another rounding below"
        explained = {name: share**2 * clear[name].size for name, share in shares.items()}
        facts = []
        for name in sorted(shares, key=lambda name: -explained[name]):
            fact = Fact(required, name, reference.dtype, value=shares[name], limit=limit)
            facts.append(fact)
        raise Unmet(*facts)
    return (
        f"{len(clear)} other roundings are absent; cannot be distinguished: "
        f"{', '.join(hidden) or 'none'}"
    )


def generations_agree(
    asker: Asker,
    reference: OracleReference,
    chosen: Sequence[tuple[str, Sequence[int]]] | None = None,
) -> str:
    """Require that the tokens generated after each prompt agree with the oracle's.

    Tokens and log-probabilities are compared. The prompts are sent at the same time. If the engine
    rounds, the mean difference is also compared with the rounding's mean effect on the same tokens.

    Args:
        asker: The client of the server.
        reference: The oracle and the tolerance.
        chosen: The names and ids of the prompts; None for all fixed prompts.

    Returns:
        A description of the differences.

    Raises:
        Unmet: Tokens or log-probabilities differ by more than the tolerance.
        NotRun: The engine sends no log-probabilities, or fewer than half of the tokens could be
            compared, because the engine chose other, equally likely tokens.
    """
    chosen = oracle_texts.prompts() if chosen is None else chosen
    answers = asker.ask_together([Request(tuple(ids), oracle_texts.GENERATED) for _, ids in chosen])
    judged = 0
    errors: list[float] = []
    effects: list[float] = []
    by_rounding = reference.file.rounded_places.get(reference.rounding or "", {})
    for (name, ids), answer in zip(chosen, answers, strict=True):
        right = reference.file.prompts[name]
        tokens = asker.ids(answer)
        positions = asker.positions(answer)
        result = generation_beyond(reference.tolerance, right, tokens, positions)
        judged += result.judged
        if result.facts:
            about = f"prompt {name} ({len(ids)} tokens) and {oracle_texts.GENERATED} more"
            raise Unmet(*with_subject(about, result.facts))
        exact = right.generated_places
        rounded = by_rounding.get(name, ())
        compared = tokens[: result.judged]
        for token, position, one, other in zip(compared, positions, exact, rounded, strict=False):
            values = dict(zip(one.ids, one.values, strict=True))
            rounded_values = dict(zip(other.ids, other.values, strict=True))
            for token_id, value in _listed(token, position):
                if token_id in values and token_id in rounded_values:
                    errors.append(abs(value - values[token_id]))
                    effects.append(abs(rounded_values[token_id] - values[token_id]))
    requested = len(chosen) * oracle_texts.GENERATED
    if judged < requested / 2:
        raise NotRun(
            f"only {judged} of {requested} generated tokens could be compared with the oracle's: "
            "the server chose other, equally likely tokens, after which nothing is compared"
        )
    tokens_judged = f"{judged} generated tokens, {reference.dtype}"
    if not effects:
        return f"{tokens_judged}: each token was compared separately"
    return _judge_mean(tokens_judged, errors, effects)


def _judge_mean(tokens: str, errors: Sequence[float], effects: Sequence[float]) -> str:
    """Compare the mean error of the server with the mean effect of the rounding."""
    mean = math.fsum(errors) / len(errors)
    allowed = _MARGIN_OF_GENERATED * math.fsum(effects) / len(effects)
    required = f"a mean error of {_MARGIN_OF_GENERATED:g} times the effect of rounding, at most"
    about = f"{len(errors)} log-probabilities of {tokens}"
    require(mean <= allowed, required, "", about, value=mean, limit=allowed, unit="nats")
    return f"{tokens}: off by {mean:.2g} nats on average ({allowed:.2g} allowed)"


def _of_prompts(asker: Asker, names: Sequence[str]) -> list[float]:
    """Return the server's log-probabilities of several fixed prompts, concatenated."""
    fixed: Mapping[str, Sequence[int]] = dict(oracle_texts.prompts())
    values: list[float] = []
    for name in names:
        values += _of_prompt(asker, fixed[name])
    return values


def _of_prompt(asker: Asker, ids: Sequence[int]) -> list[float]:
    answer = asker.ask(Request(tuple(ids), 1, prompt_log_probabilities=True))
    return list(asker.need(answer.prompt_log_probabilities, "prompt_logprobs"))
