"""What is required of each answer of a load, and of a load as a whole; and what can be wrong, each
with who to ask (``fixtures/stress/faults.toml``). The class of a crash bundle comes from here where
the server's own log has no cause."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sm121.answers import agreement
from sm121.client.completion_json import Completion
from sm121.client.completion_rules import wrong_positions
from sm121.client.jobs import Job, JobOutcome, LoadResult
from sm121.core import data_file, errors
from sm121.core.level_settings import AgreementBound
from sm121.core.vocabulary import Vocabulary


class FaultKinds(data_file.DataTable):
    """The whole file."""

    gravest: tuple[str, ...]
    owners: dict[str, str]


_KINDS = data_file.load("stress/faults.toml", FaultKinds)
#: Who to ask, or what to look at, by the kind of fault.
OWNERS = _KINDS.owners


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class UnderLoad(errors.Sm121Error, AssertionError):
    """The server did not stand a load. ``faults``: the gravest kinds first, then in order."""

    def __init__(self, load: str, faults: list[Fault], count: int) -> None:
        self.what = load
        ranks = {kind: rank for rank, kind in enumerate(_KINDS.gravest)}
        self.faults = faults = sorted(faults, key=lambda f: ranks.get(f.kind, len(ranks)))
        listed = "; ".join(str(fault) for fault in faults[:3])
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        of = f" of {count} requests" if count else ""
        super().__init__(f"{load}: required no fault, seen {len(faults)}{of}: {listed}{more}")

    @property
    def kind(self) -> str:
        """The class of all of it."""
        return self.faults[0].kind


#: Fewer requests than this have no tail to speak of.
_LEAST_FOR_A_TAIL = 20


def faults(
    load: LoadResult, bound: AgreementBound, *, stopped_at: float | None = None
) -> list[Fault]:
    """Everything that is wrong with the answers of a load. `stopped_at`: of ``time.monotonic``:
    when the server was told to stop. From then on it may end what is under way with the
    finish_reason ``abort``, as vLLM does where it has the time (v1/engine/core.py)."""
    each = (fault(o, bound, aborted=is_aborted(o, stopped_at)) for o in load.outcomes)
    return [item for item in each if item is not None]


def is_aborted(outcome: JobOutcome, stopped_at: float | None) -> bool:
    """Whether a server that was stopped has ended a request and said so."""
    if stopped_at is None or outcome.ended is None or outcome.answer is None:
        return False
    return outcome.ended >= stopped_at and outcome.answer.finish_reason == "abort"


def fault(outcome: JobOutcome, bound: AgreementBound, *, aborted: bool = False) -> Fault | None:
    """What is wrong with one answer; None if it holds. `bound`: how far it may be from the answer
    that the prompt has alone; `aborted`: it may be shorter; what came must be right."""
    job = outcome.job
    where = f"request {outcome.number} ({job.name})"
    if outcome.problem is not None and outcome.problem[0] == "stopped":
        return None
    if outcome.problem is None and outcome.status is not None and outcome.status >= 500:
        return Fault("http_5xx", f"{where}: status {outcome.status}")  # to whoever went away too
    if job.behaviour == "bad":
        if outcome.status is not None and 400 <= outcome.status < 500:
            return None
        if outcome.problem is not None and outcome.problem[0] != "refused":
            kind, text = outcome.problem
            return Fault(kind, f"{where}: required status 4xx, seen {text}")
        return Fault("bad_request_accepted", f"{where}: required status 4xx, seen {outcome.status}")
    if outcome.problem is not None:
        kind, text = outcome.problem
        of_the_load = kind in ("hang", "stuck_request", "memory_floor")
        return Fault(kind, text if of_the_load else f"{where}: {text}")
    if job.behaviour in ("cancel", "disconnect"):
        return None
    if outcome.answer is None:
        return Fault("bad_stream", f"{where}: required an answer, seen none")
    where += ", aborted" if aborted else ""
    answers = (outcome.answer, *outcome.others)
    wrong = (_wrong(where, job, answer, bound, aborted=aborted) for answer in answers)
    return next((fault for fault in wrong if fault is not None), None)


def _wrong(
    where: str, job: Job, answer: Completion, bound: AgreementBound, *, aborted: bool
) -> Fault | None:
    alone, tokens = job.alone, job.tokens
    if not aborted and (lacking := _lacking(where, answer, alone)) is not None:
        return lacking
    if aborted and answer.ids is None:  # how much of it came is not known
        comparable = alone is not None and alone.ids is not None
        return _lacking(where, answer, alone) if comparable else None
    if answer.ids is not None and not job.may_end:
        count = len(answer.ids)
        if count > tokens or (count < tokens and not aborted):
            kind = "token_lost" if count < tokens else "token_doubled"
            required = f"at most {tokens}" if aborted else str(tokens)
            return Fault(kind, f"{where}: required {required} token ids, seen {count}")
        tokens = count
    if answer.completion_tokens not in (None, tokens) and not job.may_end:
        return Fault(
            "wrong_usage",
            f"{where}: required usage of {tokens} tokens, seen {answer.completion_tokens}",
        )
    prompt = job.body.get("prompt")
    length = alone.prompt_tokens if alone is not None else None
    if isinstance(prompt, list):
        length = len(prompt)
    if length is not None and answer.prompt_tokens not in (None, length):
        return Fault(
            "wrong_usage",
            f"{where}: required usage of {length} prompt tokens, seen {answer.prompt_tokens}",
        )
    if answer.finish_reason != "length" and not aborted and not job.may_end:
        return Fault(
            "wrong_finish", f"{where}: required finish_reason length, seen {answer.finish_reason}"
        )
    if (wrong := wrong_positions(answer)) is not None:
        return Fault("corrupted_answer", f"{where}: {wrong}")
    if alone is None or (aborted and alone.ids is None):
        return None
    same = not aborted and answer.ids is not None and answer.ids == alone.ids
    if same and alone.text and answer.text != alone.text:
        of = f"required the text {alone.text!r} of the same tokens"
        return Fault("corrupted_answer", f"{where}: {of}, seen {answer.text!r}")
    return _against_alone(where, answer, _begun(alone, tokens) if aborted else alone, bound)


def _lacking(where: str, answer: Completion, alone: Completion | None) -> Fault | None:
    if alone is None:
        return None
    if alone.ids is not None and answer.ids is None:
        return Fault("bad_stream", f"{where}: required token ids, as asked alone, seen none")
    for field in ("completion_tokens", "prompt_tokens"):
        if getattr(alone, field) is not None and getattr(answer, field) is None:
            return Fault("wrong_usage", f"{where}: required usage with {field}, seen none")
    return None


def _against_alone(
    where: str, answer: Completion, alone: Completion, bound: AgreementBound
) -> Fault | None:
    if answer.ids is not None and alone.ids is not None and len(answer.ids) > len(alone.ids):
        # Of a long answer only the beginning was asked for alone.
        answer = _begun(answer, len(alone.ids))
    if (different := agreement.same_tokens(alone, answer)) is None:
        return None
    if bound.fork > 0 and answer.positions is not None and alone.positions is not None:
        judgement = agreement.judge(answer.positions, alone.positions, bound)
        if judgement.disagreement is None:
            return None
        different = judgement.disagreement
    kind = "corrupted_answer"
    if answer.ids is not None and alone.ids is not None:
        kind = _lost_or_doubled(answer.ids, alone.ids) or kind
    return Fault(kind, f"{where}, against the same asked alone: {different}")


def _begun(answer: Completion, tokens: int) -> Completion:
    ids = answer.ids[:tokens] if answer.ids is not None else None
    positions = answer.positions[:tokens] if answer.positions is not None else None
    return replace(answer, ids=ids, positions=positions)


def _lost_or_doubled(observed: Sequence[int], alone: Sequence[int]) -> str | None:
    for index, token in enumerate(alone):
        before, after = tuple(alone[:index]), tuple(alone[index + 1 :])
        if tuple(observed[:-1]) == before + after:
            return "token_lost"
        if tuple(observed) == (*before, token, token, *after)[: len(observed)]:
            return "token_doubled"
    return None


def text_by_its_parts(
    whole: Completion, parts: Sequence[JobOutcome], vocabulary: Vocabulary | None
) -> Fault | None:
    """How a long text is another than its ids or its parts have. A sign between two parts may be
    shown by neither. Of a part that has other tokens, within the noise, nothing is known."""
    differs = vocabulary.differs(whole.ids or (), whole.text) if vocabulary is not None else None
    text, end, is_next = _shown(whole.text), 0, True
    for answer, job in ((outcome.answer, outcome.job) for outcome in parts):
        if answer is None or job.alone is None or answer.ids != job.alone.ids:
            is_next = False
            continue
        begin = text.find(part := _shown(answer.text), end)
        if begin < 0 or (is_next and len(text[end:begin].strip()) > 1):
            observed = text[end : end + len(part) + 40]
            differs = differs or f"{job.name}: required the text {part!r}, seen {observed!r}"
            break
        end, is_next = begin + len(part), True
    if differs is None and is_next and len(text[end:].strip()) > 1:
        differs = f"required no text after the last of its tokens, seen {text[end:]!r}"
    return Fault("corrupted_answer", differs) if differs is not None else None


def _shown(text: str) -> str:
    """Without what stands for bytes of no sign: how much of it there is differs."""
    return text.replace("\ufffd", "").strip()


def slow_tail(load: LoadResult, factor: float, floor_s: float) -> Fault | None:
    """Whether the slowest request took over ``factor`` times the median and ``floor_s``."""
    complete = (o.seconds for o in load.outcomes if o.job.behaviour == "complete")
    seconds = sorted(each for each in complete if each is not None)
    if len(seconds) < _LEAST_FOR_A_TAIL:
        return None
    median = statistics.median(seconds)
    if seconds[-1] <= max(factor * median, floor_s):
        return None
    return Fault(
        "slow_tail",
        f"required at most {factor:g} times the median of {median:.2f} s, seen {seconds[-1]:.2f} s "
        f"({len(seconds)} requests)",
    )
