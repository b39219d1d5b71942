"""Measure the price of a server's rounding, that is, how much accuracy it costs.

The answers are compared with the checkpoint's own mathematics: the oracle without any rounding.
Because the texts are fixed, gates apply to the values themselves, and not to intervals. The
interval shows how much the values may differ for other texts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from sm121.answers import agreement, oracle_texts
from sm121.answers.oracle_file import OracleFile, OraclePosition, Scored
from sm121.answers.oracle_texts import ExamText
from sm121.client.completion_json import Position, id_of
from sm121.client.completions import Asker, Request
from sm121.core.errors import UsageError
from sm121.core.level_settings import PRICES, Price
from sm121.core.profile_fields import Gate
from sm121.core.verdict import NotRun
from sm121.oracles.formats import Rounding

#: Depths in tokens at which the price is also measured, if the reference contains them.
DEPTHS = (8192, 32768)
#: The number of likeliest tokens to request for each position. The reference contains as many.
_TOP = 20
#: Two evaluations of one log-softmax in float32 differ by less than this, in nats.
_ROUNDING = 1e-3
#: The divergence to assume, in nats, for a position at which the server and the checkpoint list no
#: common token. It is the divergence if the server gives the checkpoint's likely tokens a total
#: probability of 1e-6.
_APART = -math.log(1e-6)


class ServedPlace(NamedTuple):
    """One position of a text: the checkpoint's likeliest tokens, and the served probabilities."""

    #: The likeliest tokens according to the checkpoint's own mathematics.
    expected: OraclePosition
    #: The log-probabilities that the server reports; the keys are token ids.
    served: Mapping[int, float]


class PriceSamples(NamedTuple):
    """The samples from which the accuracy cost of a rounding (its price) is computed."""

    #: The samples of each metric in `PRICES`: one for each prompt or question; at a depth, one for
    #: each token.
    samples: dict[str, list[float]]
    #: The reason for each metric without samples.
    reasons: dict[str, str]


def refuse_rounded(file: OracleFile, origin: Path) -> None:
    """Reject an oracle's file that has no results without rounding.

    Args:
        file: The oracle's file.
        origin: The path of the file, for the message.

    Raises:
        UsageError: All results in the file are rounded.
    """
    if not file.unrounded:
        raise UsageError(
            f"{origin} contains answers rounded to {file.rounding}, but not the unrounded answers "
            "of the checkpoint, which are needed to measure the cost of rounding; make it again: "
            f"sm121 golden CHECKPOINT --rounding {file.rounding} -o FILE"
        )


def measure(
    asker: Asker, file: OracleFile, exam: str | None, depths: Iterable[int] = DEPTHS
) -> PriceSamples:
    """Compare a server with the reference on the fixed prompts, the exam and each depth.

    Args:
        asker: The client of the server.
        file: The reference.
        exam: The name of the exam; None for no exam.
        depths: The depths in tokens.

    Raises:
        NotRun: The engine sends no log-probabilities of a prompt.
    """
    kl, top1, right = PRICES
    measured = PriceSamples({}, {})
    measured.samples[kl] = []
    measured.samples[top1] = []
    for name, ids in oracle_texts.prompts():
        places = _places_of_prompt(asker, ids, file.unrounded[name])
        measured.samples[kl].append(fmean(map(_divergence, places)))
        measured.samples[top1].append(fmean(map(_likeliest, places)))
    text = oracle_texts.exams().get(exam or "")
    if text is None or text.name not in file.unrounded:
        measured.reasons[right] = f"the reference contains no correct answers to exam {exam}"
    else:
        try:
            samples = _right_answers(asker, text, file.unrounded[text.name])
            measured.samples[right] = samples
        except NotRun as error:  # the server's context is shorter than the exam
            measured.reasons[right] = str(error)
    for depth in depths:
        try:
            places = _places_at_depth(asker, file, depth)
            measured.samples[f"{kl}@d{depth}"] = list(map(_divergence, places))
            measured.samples[f"{top1}@d{depth}"] = list(map(_likeliest, places))
        except NotRun as error:
            measured.reasons[f"{kl}@d{depth}"] = str(error)
            measured.reasons[f"{top1}@d{depth}"] = str(error)
        reason = "the exam is sent without a long text before it"
        measured.reasons[f"{right}@d{depth}"] = reason
    return measured


def gates(prices: Iterable[Price], rounding: Rounding | None) -> dict[str, Gate]:
    """Return the gates on the accuracy cost of a rounding.

    Args:
        prices: The accepted accuracy costs (prices) in the profile.
        rounding: The rounding; None if it is unknown, so that no gates apply.

    Returns:
        The gates; the keys are the metrics.
    """
    if rounding is None:
        return {}
    by_metric = {}
    for price in prices:
        if Rounding.parse(price.rounding) == rounding:
            by_metric.update({gate.metric: gate for gate in price.gates})
    return by_metric


def _places_of_prompt(asker: Asker, ids: Sequence[int], scored: Scored) -> list[ServedPlace]:
    request = Request(tuple(ids), 1, prompt_log_probabilities=True, prompt_top=_TOP)
    tops = asker.need(asker.ask(request).prompt_tops, "prompt_logprobs")
    return [ServedPlace(*pair) for pair in zip(scored.places, tops, strict=False)]


def _places_at_depth(asker: Asker, file: OracleFile, depth: int) -> list[ServedPlace]:
    """Return the positions after a long prompt.

    The tokens before each position are the reference's.

    If the server generates another token, the rest is requested again after the reference's token.
    """
    scored = file.unrounded.get(f"{depth} tokens")
    if scored is None:
        raise NotRun(
            f"the reference has no depth {depth}; make it with sm121 golden --depth {depth}"
        )
    _, ids = oracle_texts.long_prompt(depth)
    places: list[ServedPlace] = []
    while len(places) < len(scored.generated):
        done = len(places)
        left = len(scored.generated) - done
        request = Request((*ids, *scored.generated[:done]), left, top=_TOP)
        for position in asker.positions(asker.ask(request)):
            index = len(places)
            places.append(ServedPlace(scored.generated_places[index], _by_id(position)))
            if id_of(position.token) != scored.generated[index]:
                break
    return places


def _by_id(position: Position) -> dict[int, float]:
    """Return the log-probabilities of a position; the keys are token ids.

    Raises NotRun if the engine identifies tokens only by their texts.
    """
    by_id = {}
    for name, value in {position.token: position.log_probability, **position.top}.items():
        token = id_of(name)
        if token is None:
            raise NotRun(
                "the engine names the tokens of log-probabilities by their text, not by ids"
            )
        by_id[token] = value
    return by_id


def _right_answers(asker: Asker, text: ExamText, scored: Scored) -> list[float]:
    """For each correct answer, return the server's log-probability minus the checkpoint's."""
    answer = asker.ask(Request(tuple(text.token_ids), 1, prompt_log_probabilities=True))
    served = asker.need(answer.prompt_log_probabilities, "prompt_logprobs")
    changes = []
    for expected, value in zip(scored.following, served, strict=True):
        is_valid = -math.inf < value <= _ROUNDING
        changes.append(value - expected if is_valid else -math.inf)
    # The log-probabilities begin with the second token.
    return [math.fsum(changes[first - 1 : last - 1]) for first, last in text.answers.values()]


def _divergence(place: ServedPlace) -> float:
    """Return KL(checkpoint || server) over the common tokens and one class of all others.

    The result is a lower bound of the full divergence. It is infinite if a log-probability is not a
    number, or if the server's probabilities sum to more than 1, because these faults would
    otherwise go unnoticed.
    """
    reference, served = place
    expected = dict(zip(reference.ids, reference.values, strict=True))
    if not all(-math.inf < value <= _ROUNDING for value in served.values()):
        return math.inf
    if math.fsum(map(math.exp, served.values())) > 1.0 + 2.0 * _ROUNDING:
        return math.inf
    if not expected.keys() & served.keys():
        return _APART
    return agreement.divergence(expected, served)


def _likeliest(place: ServedPlace) -> float:
    """Return 100 if the server's likeliest token is also the checkpoint's, else 0."""
    reference, served = place
    likeliest = max(served, key=served.__getitem__, default=None)
    return 100.0 if likeliest == reference.ids[0] else 0.0
