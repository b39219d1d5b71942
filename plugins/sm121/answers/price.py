"""What a server's rounding costs: how far its answers are from the checkpoint's own mathematics,
the oracle's without any rounding. The texts are fixed, so that the values decide as they are; an
interval says how far they hold for other texts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from sm121.answers import agreement, oracle_file
from sm121.answers.oracle_file import ExamText, OracleFile, Place, Scored
from sm121.client.completions import Asker, Position, Request, id_of
from sm121.core.errors import UsageError
from sm121.core.level_settings import PRICES, Price
from sm121.core.profile_fields import Gate
from sm121.core.verdict import NotRun
from sm121.oracles.formats import Rounding

#: Depths in tokens at which the price is measured too, where the reference has them.
DEPTHS = (8192, 32768)
#: Likeliest tokens that the server tells of each place: as many as the reference has.
_TOP = 20
#: What two evaluations of one log-softmax in float32 may differ by, in nats.
_ROUNDING = 1e-3
#: Nats of a place where both have no likely token in common: as if the server gave all that are
#: likely a millionth together.
_APART = -math.log(1e-6)

#: What the checkpoint says of a place, and the log-probabilities that the server tells of it.
_Pair = tuple[Place, Mapping[int, float]]


def refuse_rounded(file: OracleFile, origin: Path) -> None:
    """A price needs what the checkpoint itself says. Raises UsageError: the file has what rounds
    alone; one line that names both."""
    if not file.unrounded:
        raise UsageError(
            f"{origin} rounds {file.rounding} and lacks the checkpoint's own mathematics (rounding "
            f"checkpoint), with which a price is compared; make it anew: sm121 golden CHECKPOINT "
            f"--rounding {file.rounding} -o FILE"
        )


def measure(
    asker: Asker, file: OracleFile, exam: str | None, depths: Iterable[int] = DEPTHS
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Ask a server for the fixed prompts, the exam's text and each depth of the reference. Returns
    samples by metric (`PRICES`), one of each prompt and question or, at a depth, of each token; and
    why a metric has none. Raises NotRun: the engine tells no log-probabilities of a prompt."""
    kl, likeliest, right = PRICES
    pairs = [_of_prompt(asker, ids, file.unrounded[name]) for name, ids in oracle_file.prompts()]
    samples = {
        kl: [fmean(map(_divergence, each)) for each in pairs],
        likeliest: [fmean(map(_likeliest, each)) for each in pairs],
    }
    reasons: dict[str, str] = {}
    text = oracle_file.exams().get(exam or "")
    if text is None or text.name not in file.unrounded:
        reasons[right] = f"the reference has no right answers of exam {exam}"
    else:
        try:
            samples[right] = _right_answers(asker, text, file.unrounded[text.name])
        except NotRun as why:  # its context is shorter than the exam
            reasons[right] = str(why)
    for depth in depths:
        scored = file.unrounded.get(f"{depth} tokens")
        try:
            if scored is None:
                raise NotRun(f"the reference has no depth {depth}: sm121 golden --depth {depth}")
            deep = _generated(asker, oracle_file.long_prompt(depth)[1], scored)
            samples[f"{kl}@d{depth}"] = [*map(_divergence, deep)]
            samples[f"{likeliest}@d{depth}"] = [*map(_likeliest, deep)]
        except NotRun as why:
            reasons |= {f"{kl}@d{depth}": str(why), f"{likeliest}@d{depth}": str(why)}
        reasons[f"{right}@d{depth}"] = "the exam is asked without a long text before it"
    return samples, reasons


def gates(prices: Iterable[Price], rounding: Rounding | None) -> dict[str, Gate]:
    """What the profile's prices require of a server that rounds so, by metric; nothing where there
    is none for it, or where it is not known how it rounds."""
    rows = [row for row in prices if rounding and Rounding.parse(row.rounding) == rounding]
    return {gate.metric: gate for row in rows for gate in row.gates}


def _of_prompt(asker: Asker, ids: Sequence[int], scored: Scored) -> list[_Pair]:
    request = Request(tuple(ids), 1, prompt_log_probabilities=True, prompt_top=_TOP)
    tops = asker.need(asker.ask(request).prompt_tops, "prompt_logprobs")
    return [*zip(scored.places, tops, strict=False)]


def _generated(asker: Asker, ids: Sequence[int], scored: Scored) -> list[_Pair]:
    """The tokens behind a long prompt, each after the reference's own ones: where the server goes
    on with another token, it is asked again behind the right one."""
    pairs: list[_Pair] = []
    while done := len(scored.generated) - len(pairs):
        request = Request((*ids, *scored.generated[: len(pairs)]), done, top=_TOP)
        for position in asker.positions(asker.ask(request)):
            pairs.append((scored.generated_places[len(pairs)], _by_id(position)))
            if id_of(position.token) != scored.generated[len(pairs) - 1]:
                break
    return pairs


def _by_id(position: Position) -> dict[int, float]:
    """The log-probabilities of a token. Raises NotRun: the engine names no ids."""
    named = {position.token: position.log_probability, **position.top}
    by_id = {token: value for name, value in named.items() if (token := id_of(name)) is not None}
    if len(by_id) < len(named):
        raise NotRun("the engine names the tokens of log-probabilities by their text, not by ids")
    return by_id


def _right_answers(asker: Asker, text: ExamText, scored: Scored) -> list[float]:
    """By question, how much likelier the server holds the right answer than the checkpoint does, in
    nats."""
    answer = asker.ask(Request(tuple(text.token_ids), 1, prompt_log_probabilities=True))
    served = asker.need(answer.prompt_log_probabilities, "prompt_logprobs")
    pairs = zip(scored.following, served, strict=True)
    changes = [b - a if -math.inf < b <= _ROUNDING else -math.inf for a, b in pairs]
    return [math.fsum(changes[first - 1 : last - 1]) for first, last in text.answers.values()]


def _divergence(pair: _Pair) -> float:
    """KL(checkpoint || server) over the tokens that both tell and one class for all else, which is
    at most the whole divergence. Infinite where a log-probability is no number, or where what the
    server tells is likelier than 1 together: as if that cost nothing."""
    expected, served = dict(zip(pair[0].ids, pair[0].values, strict=True)), pair[1]
    if not all(-math.inf < value <= _ROUNDING for value in served.values()):
        return math.inf
    if math.fsum(map(math.exp, served.values())) > 1.0 + 2.0 * _ROUNDING:
        return math.inf
    return agreement.divergence(expected, served) if expected.keys() & served else _APART


def _likeliest(pair: _Pair) -> float:
    """100 where the likeliest token is the checkpoint's, else 0."""
    return 100.0 * (max(pair[1], key=pair[1].__getitem__, default=None) == pair[0].ids[0])
