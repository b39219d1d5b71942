"""The requirements on each answer of a load and on the load as a whole, and their faults.

Each kind of fault has an owner (``fixtures/stress/faults.toml``). If the server's log shows no
cause of a crash, the kind of fault is the class of the crash bundle.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sm121.answers import agreement
from sm121.client.completion_json import Completion
from sm121.client.completion_rules import wrong_positions
from sm121.client.jobs import Job, JobOutcome, LoadResult
from sm121.core import data_file, errors
from sm121.core.level_settings import AgreementBound
from sm121.core.vocabulary import Vocabulary


class FaultKinds(data_file.DataTable):
    """The content of ``fixtures/stress/faults.toml``."""

    gravest: tuple[str, ...]
    owners: dict[str, str]


_KINDS = data_file.load("stress/faults.toml", FaultKinds)
#: For each kind of fault, the component that causes it, or what to examine.
OWNERS = _KINDS.owners
#: Maximum number of faults in the text of an error.
_SHOWN_FAULTS = 3
#: Minimum number of requests for checking the slowest one.
_LEAST_FOR_A_TAIL = 20
#: Faults of the whole load, whose texts are not prefixed with a request.
_OF_THE_LOAD = ("hang", "stuck_request", "memory_floor")
#: Number of characters beyond the length of a missing part that a message shows.
_SHOWN_BEYOND = 40


@dataclass(frozen=True)
class Fault:
    """A fault of an answer, a load or the server after a load."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class UnderLoad(errors.Sm121Error, AssertionError):
    """The server did not withstand a load.

    Args:
        load: The name of the load.
        faults: Its faults; at least one.
        count: The number of requests of the load; 0 if the faults do not belong to requests.

    Attributes:
        what: The name of the load.
        faults: The faults, sorted by gravity of their kind.
    """

    def __init__(self, load: str, faults: list[Fault], count: int) -> None:
        self.what = load
        ranks = {kind: rank for rank, kind in enumerate(_KINDS.gravest)}
        self.faults = sorted(faults, key=lambda fault: ranks.get(fault.kind, len(ranks)))
        listed = "; ".join(str(fault) for fault in self.faults[:_SHOWN_FAULTS])
        hidden = len(faults) - _SHOWN_FAULTS
        more = f" (and {hidden} more)" if hidden > 0 else ""
        of = f" of {count} requests" if count else ""
        super().__init__(f"{load}: expected no fault, got {len(faults)}{of}: {listed}{more}")

    @property
    def kind(self) -> str:
        """The kind of the most severe fault."""
        return self.faults[0].kind


def faults(
    load: LoadResult, bound: AgreementBound, *, stopped_at: float | None = None
) -> list[Fault]:
    """Find the faults in the answers of a load.

    Args:
        load: The load.
        bound: How far an answer may differ from the answer to the same prompt sent alone.
        stopped_at: When the server received the request to stop (``time.monotonic``). After that,
            it may end requests with the finish_reason ``abort``, as vLLM does if it has the time
            (v1/engine/core.py).
    """
    found: list[Fault] = []
    for outcome in load.outcomes:
        first = fault(outcome, bound, aborted=is_aborted(outcome, stopped_at))
        if first is not None:
            found.append(first)
    return found


def is_aborted(outcome: JobOutcome, stopped_at: float | None) -> bool:
    """Return whether a stopped server ended a request with the finish_reason ``abort``.

    Args:
        outcome: The request.
        stopped_at: When the server received the request to stop; None if it did not.
    """
    if stopped_at is None or outcome.ended is None or outcome.answer is None:
        return False
    return outcome.ended >= stopped_at and outcome.answer.finish_reason == "abort"


def fault(outcome: JobOutcome, bound: AgreementBound, *, aborted: bool = False) -> Fault | None:
    """Check one answer.

    Args:
        outcome: The request.
        bound: How far the answer may differ from the answer to the same prompt sent alone.
        aborted: Whether the answer may be shorter. The received tokens must still be correct.

    Returns:
        The first fault, or None.
    """
    job = outcome.job
    where = f"request {outcome.number} ({job.name})"
    if outcome.problem is not None and outcome.problem[0] == "stopped":
        return None
    if outcome.problem is None and outcome.status is not None and outcome.status >= 500:
        # This status is a fault even if the client disconnected.
        return Fault("http_5xx", f"{where}: status {outcome.status}")
    if job.behaviour == "bad":
        return _check_refusal(outcome, where)
    if outcome.problem is not None:
        kind, text = outcome.problem
        return Fault(kind, text if kind in _OF_THE_LOAD else f"{where}: {text}")
    if job.behaviour in ("cancel", "disconnect"):
        return None
    if outcome.answer is None:
        return Fault("bad_stream", f"{where}: expected an answer, got none")
    if aborted:
        where += ", aborted"
    for answer in (outcome.answer, *outcome.others):
        found = _check_answer(where, job, answer, bound, aborted=aborted)
        if found is not None:
            return found
    return None


def _check_refusal(outcome: JobOutcome, where: str) -> Fault | None:
    """Check that the server refused an invalid request."""
    if outcome.status is not None and 400 <= outcome.status < 500:
        return None
    if outcome.problem is not None:
        kind, text = outcome.problem
        if kind != "refused":
            return Fault(kind, f"{where}: expected status 4xx, got {text}")
    return Fault("bad_request_accepted", f"{where}: expected status 4xx, got {outcome.status}")


def _check_answer(
    where: str, job: Job, answer: Completion, bound: AgreementBound, *, aborted: bool
) -> Fault | None:
    alone = job.alone
    if aborted and answer.ids is None:
        # The number of received tokens is unknown.
        if alone is None or alone.ids is None:
            return None
        return _check_fields(where, answer, alone)
    if not aborted:
        lacking = _check_fields(where, answer, alone)
        if lacking is not None:
            return lacking
    tokens = job.tokens
    if answer.ids is not None and not job.may_end:
        miscounted = _check_count(where, len(answer.ids), tokens, aborted=aborted)
        if miscounted is not None:
            return miscounted
        tokens = len(answer.ids)
    return (
        _check_usage(where, job, answer, tokens)
        or _check_finish(where, job, answer, aborted=aborted)
        or _check_stop(where, job, answer)
        or _check_positions(where, answer)
        or _compare(where, answer, alone, bound, tokens=tokens if aborted else None)
    )


def _check_fields(where: str, answer: Completion, alone: Completion | None) -> Fault | None:
    """Require the fields that the answer to the same prompt sent alone has."""
    if alone is None:
        return None
    if alone.ids is not None and answer.ids is None:
        return Fault(
            "bad_stream",
            f"{where}: expected token ids, as in the answer to the prompt sent alone, got none",
        )
    for field in ("completion_tokens", "prompt_tokens"):
        if getattr(alone, field) is not None and getattr(answer, field) is None:
            return Fault("wrong_usage", f"{where}: expected usage with {field}, got none")
    return None


def _check_count(where: str, count: int, tokens: int, *, aborted: bool) -> Fault | None:
    """Check the number of token ids."""
    if count > tokens:
        required = f"at most {tokens}" if aborted else str(tokens)
        return Fault("token_doubled", f"{where}: expected {required} token ids, got {count}")
    if count < tokens and not aborted:
        return Fault("token_lost", f"{where}: expected {tokens} token ids, got {count}")
    return None


def _check_usage(where: str, job: Job, answer: Completion, tokens: int) -> Fault | None:
    if answer.completion_tokens not in (None, tokens) and not job.may_end:
        return Fault(
            "wrong_usage",
            f"{where}: expected usage of {tokens} tokens, got {answer.completion_tokens}",
        )
    length = None
    prompt = job.body.get("prompt")
    if isinstance(prompt, list):
        length = len(prompt)
    elif job.alone is not None:
        length = job.alone.prompt_tokens
    if length is not None and answer.prompt_tokens not in (None, length):
        return Fault(
            "wrong_usage",
            f"{where}: expected usage of {length} prompt tokens, got {answer.prompt_tokens}",
        )
    return None


def _check_finish(where: str, job: Job, answer: Completion, *, aborted: bool) -> Fault | None:
    if answer.finish_reason == "length" or aborted or job.may_end:
        return None
    return Fault(
        "wrong_finish", f"{where}: expected finish_reason length, got {answer.finish_reason}"
    )


def _check_stop(where: str, job: Job, answer: Completion) -> Fault | None:
    """Check that an answer ends at its stop string, like the answer to the same request alone.

    The texts are compared, not the ids: a step with several tokens may contain ids after the stop
    string.
    """
    alone = job.alone
    if "stop" not in job.body or alone is None or alone.finish_reason != "stop":
        return None
    if alone.ids is None or answer.ids is None or answer.text == alone.text:
        return None
    if answer.ids[: len(alone.ids)] != alone.ids:
        return None  # the tokens differ, which `_compare` judges
    required = f"expected an end at its stop string, the text {alone.text!r}"
    return Fault("corrupted_answer", f"{where}: {required}, got {answer.text!r}")


def _check_positions(where: str, answer: Completion) -> Fault | None:
    difference = wrong_positions(answer)
    return None if difference is None else Fault("corrupted_answer", f"{where}: {difference}")


def _compare(
    where: str,
    answer: Completion,
    alone: Completion | None,
    bound: AgreementBound,
    *,
    tokens: int | None,
) -> Fault | None:
    """Compare an answer with the answer to the same request sent alone.

    ``tokens``: the number of tokens of an aborted answer; None for any other.
    """
    if alone is None:
        return None
    if tokens is not None:
        if alone.ids is None:
            return None
        return _compare_tokens(where, answer, _beginning(alone, tokens), bound)
    has_same_ids = answer.ids is not None and answer.ids == alone.ids
    if has_same_ids and alone.text and answer.text != alone.text:
        required = f"expected the text {alone.text!r} of the same tokens"
        return Fault("corrupted_answer", f"{where}: {required}, got {answer.text!r}")
    return _compare_tokens(where, answer, alone, bound)


def _compare_tokens(
    where: str, answer: Completion, alone: Completion, bound: AgreementBound
) -> Fault | None:
    if answer.ids is not None and alone.ids is not None and len(answer.ids) > len(alone.ids):
        # For a long answer, only the beginning was requested alone.
        answer = _beginning(answer, len(alone.ids))
    different = agreement.same_tokens(alone, answer)
    if different is None:
        return None
    if bound.fork > 0 and answer.positions is not None and alone.positions is not None:
        judgement = agreement.compare_runs(answer.positions, alone.positions, bound)
        if judgement.disagreement is None:
            return None
        different = judgement.disagreement
    kind = "corrupted_answer"
    if answer.ids is not None and alone.ids is not None:
        kind = _lost_or_doubled(answer.ids, alone.ids) or kind
    return Fault(kind, f"{where}, compared with the answer to the prompt sent alone: {different}")


def _beginning(answer: Completion, tokens: int) -> Completion:
    """Return the first tokens of an answer."""
    ids = answer.ids[:tokens] if answer.ids is not None else None
    positions = answer.positions[:tokens] if answer.positions is not None else None
    return replace(answer, ids=ids, positions=positions)


def _lost_or_doubled(observed: Sequence[int], alone: Sequence[int]) -> str | None:
    """Return the kind of fault if exactly one token is missing or comes twice, else None."""
    for index, token in enumerate(alone):
        before = tuple(alone[:index])
        after = tuple(alone[index + 1 :])
        if tuple(observed[:-1]) == before + after:
            return "token_lost"
        doubled = (*before, token, token, *after)
        if tuple(observed) == doubled[: len(observed)]:
            return "token_doubled"
    return None


def text_by_its_parts(
    whole: Completion, parts: Sequence[JobOutcome], vocabulary: Vocabulary | None
) -> Fault | None:
    """Compare the text of a long answer with its token ids and with the texts of its parts.

    A character that is split between two parts may be missing in both texts. A part whose tokens
    differ, within the noise, is skipped.

    Args:
        whole: The long answer.
        parts: The requests for its parts, in order.
        vocabulary: The texts of the tokens; None if they are unknown.
    """
    if vocabulary is not None:
        difference = vocabulary.differs(whole.ids or (), whole.text)
        if difference is not None:
            return Fault("corrupted_answer", difference)
    difference = _compare_parts(_readable(whole.text), parts)
    return None if difference is None else Fault("corrupted_answer", difference)


def _compare_parts(text: str, parts: Sequence[JobOutcome]) -> str | None:
    """Return how a text differs from the texts of its parts, or None."""
    end = 0
    is_next = True  # whether this part follows the found part before it
    for outcome in parts:
        answer = outcome.answer
        job = outcome.job
        if answer is None or job.alone is None or answer.ids != job.alone.ids:
            is_next = False
            continue
        part = _readable(answer.text)
        start = text.find(part, end)
        if start < 0 or (is_next and len(text[end:start].strip()) > 1):
            observed = text[end : end + len(part) + _SHOWN_BEYOND]
            return f"{job.name}: expected the text {part!r}, got {observed!r}"
        end = start + len(part)
        is_next = True
    if is_next and len(text[end:].strip()) > 1:
        return f"expected no text after the last of its tokens, got {text[end:]!r}"
    return None


def _readable(text: str) -> str:
    """Remove replacement characters, whose number may differ, and surrounding blanks."""
    return text.replace("\ufffd", "").strip()


def slow_tail(load: LoadResult, factor: float, floor_s: float) -> Fault | None:
    """Check the slowest request of a load.

    Args:
        load: The load. It is not checked if it has fewer than 20 complete answers.
        factor: The maximum duration of a request, as a multiple of the median.
        floor_s: A duration in seconds that is always allowed.
    """
    seconds = sorted(_seconds(load))
    if len(seconds) < _LEAST_FOR_A_TAIL:
        return None
    median = statistics.median(seconds)
    if seconds[-1] <= max(factor * median, floor_s):
        return None
    return Fault(
        "slow_tail",
        f"expected at most {factor:g} times the median of {median:.2f} s, got {seconds[-1]:.2f} s "
        f"({len(seconds)} requests)",
    )


def _seconds(load: LoadResult) -> Iterator[float]:
    for outcome in load.outcomes:
        if outcome.job.behaviour == "complete" and outcome.seconds is not None:
            yield outcome.seconds
