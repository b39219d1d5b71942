"""Divide the time of a decode step into parts and the host's share, and judge both.

A step and a token are two things: with speculative decoding, a step generates several tokens. The
host's share and the parts are those of a step; limits named "a token" apply to tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from sm121.core.data_file import Record
from sm121.evidence import decode_parts
from sm121.evidence.decode_parts import ROWS, Row
from sm121.evidence.kernel_names import entry_of
from sm121.evidence.kernel_profile import HostTime, KernelProfile

#: The maximum length of a kernel's name in a message, in characters.
_LONGEST_NAME = 120
#: The number of longest kernels in a message.
_NAMED_KERNELS = 5
#: The maximum length of the name of each of the longest kernels, in characters.
_SHORT_NAME = 60
#: A step may be shorter than the sum of its kernels by this share, because times vary between
#: steps.
_TOLERANCE = 0.05


class RowTime(Record):
    """The times of one row of the table of kernels."""

    row: Row
    share: float
    """The share of a step, or of the time of all kernels if the steps' times are unknown."""
    average_us: float | None
    """The mean time of a launch; null for the host."""
    calls_per_token: float | None
    """The launches for each decoded token; null for the host, and if the number of tokens is
    unknown."""
    token_ms: float | None
    """Milliseconds for each decoded token; null if the number of tokens is unknown."""


class DecodeTime(Record):
    """The times of decode steps of one request."""

    of: str
    """The whole to which ``share`` refers: ``step``, or ``kernels`` (the time of all kernels)."""
    steps: int | None
    """The number of decode steps; null if the profile does not mark steps."""
    tokens_per_step: float | None
    """The mean number of tokens that a step generates: 1 without speculative decoding. Null if it
    is unknown."""
    token_ms: float | None
    """Milliseconds from one token to the next without the profiler; null if not measured."""
    token_busy_ms: float | None
    """Milliseconds for each token in which a kernel ran; null if the number of tokens is
    unknown."""
    step_ms: float | None
    """Milliseconds from the start of a step to the start of the next one."""
    clock: Literal["stream", "profiler"] | None
    """How ``step_ms`` was measured. ``stream``: from the arrival of tokens before the profiler was
    started. ``profiler``: from the trace, in which steps are longer, because a profiler slows the
    host."""
    traced_step_ms: float | None
    """Milliseconds of a step in the trace."""
    busy_ms: float | None
    """Milliseconds of a step in which a kernel ran."""
    overlap: float | None
    """How much kernels overlap: the sum of all kernels' times divided by the time in which at
    least one kernel ran, minus 1."""
    host_share: float | None
    """The share of a step in which no kernel ran; null if it is unknown. If ``clock`` is
    ``profiler``, the share includes the cost of the profiler."""
    launches: float | None
    """The number of launches of kernels or graphs by the host, per step."""
    kernels: float | None
    """The number of kernels that ran, per step."""
    moe_layer_ms: float | None
    """The time of both products of the experts of one layer, in one step."""
    rows: list[RowTime]
    """The rows of the table that took any time."""


@dataclass(frozen=True)
class _Kernels:
    """The number of calls and the total time of all kernels of one row."""

    calls: int
    seconds: float


@dataclass(frozen=True)
class StreamTime:
    """The time of a server's tokens without the profiler.

    Attributes:
        token_s: Seconds from one token to the next.
        tokens_per_step: The mean number of tokens of a step; None: unknown.
    """

    token_s: float
    tokens_per_step: float | None = None


def measure(profile: KernelProfile, stream: StreamTime | None = None) -> DecodeTime | None:
    """Divide the time of decode steps into the rows of the table.

    Args:
        profile: The kernels of some decode steps of one request.
        stream: The time of a token without the profiler; None: unknown.

    Returns:
        The times; None for a CPU's profile, which has operators instead of kernels.
    """
    if profile.kind != "gpu":
        return None
    steps = profile.steps
    host = profile.host
    tokens_per_step = _tokens_per_step(profile, stream)
    tokens = None
    if steps is not None and tokens_per_step is not None:
        tokens = steps * tokens_per_step
    clock: Literal["stream", "profiler"] | None = None if host is None else "profiler"
    total_s = profile.seconds if host is None else host.wall_s
    timed_s = _timed_s(stream, tokens, host)
    if timed_s is not None:
        clock = "stream"
        total_s = timed_s
    host_share = None
    if host is not None and host.wall_s > 0:
        host_share = round((total_s - host.busy_s) / total_s, 4)
    return DecodeTime(
        of="kernels" if host is None else "step",
        steps=steps,
        tokens_per_step=tokens_per_step,
        token_ms=None if stream is None else round(stream.token_s * 1e3, 4),
        token_busy_ms=_ms(tokens, None if host is None else host.busy_s),
        step_ms=None if host_share is None else _ms(steps, total_s),
        clock=clock,
        traced_step_ms=_ms(steps, None if host is None else host.wall_s),
        busy_ms=_ms(steps, None if host is None else host.busy_s),
        overlap=_overlap(profile),
        host_share=host_share,
        launches=_each(steps, None if host is None else host.launches),
        kernels=_each(steps, sum(kernel.calls for kernel in profile.kernels)),
        moe_layer_ms=_moe_layer_ms(profile),
        rows=_rows(profile, total_s, host_share, tokens),
    )


def _tokens_per_step(profile: KernelProfile, stream: StreamTime | None) -> float | None:
    """Return the mean number of tokens that a step generates; None if it is unknown."""
    if profile.step_tokens == 1:
        return 1.0
    if stream is not None and stream.tokens_per_step is not None:
        return stream.tokens_per_step
    return None


def _timed_s(
    stream: StreamTime | None, tokens: float | None, host: HostTime | None
) -> float | None:
    """Return the seconds of all steps without the profiler; None if they are unknown."""
    if stream is None or tokens is None or host is None:
        return None
    seconds = stream.token_s * tokens
    if seconds < host.busy_s * (1 - _TOLERANCE):
        return None  # the timed steps are not the profiled steps
    return max(seconds, host.busy_s)


def _rows(
    profile: KernelProfile, total_s: float, host_share: float | None, tokens: float | None
) -> list[RowTime]:
    """Return the rows of the table that took any time."""
    by_row = _by_row(profile)
    rows = []
    for row in ROWS:
        kernels = by_row.get(row)
        if kernels is not None and total_s > 0:
            rows.append(_row_time(row, kernels, total_s, tokens))
    if host_share is not None:
        rows.append(
            RowTime(
                row="host",
                share=host_share,
                average_us=None,
                calls_per_token=None,
                token_ms=_ms(tokens, total_s * host_share),
            )
        )
    return rows


def _by_row(profile: KernelProfile) -> dict[Row, _Kernels]:
    """Sum the kernels of each row."""
    calls: dict[Row, int] = {}
    seconds: dict[Row, float] = {}
    for kernel in profile.kernels:
        row = decode_parts.row_of(kernel.name)
        calls[row] = calls.get(row, 0) + kernel.calls
        seconds[row] = seconds.get(row, 0.0) + kernel.seconds
    by_row = {row: _Kernels(calls[row], seconds[row]) for row in calls}
    products = profile.products
    if products is not None:
        by_row.pop("moe_products", None)
        by_row["moe_fc1"] = _Kernels(products.pairs, products.first_s)
        by_row["moe_fc2"] = _Kernels(products.pairs, products.second_s)
    return by_row


def _row_time(row: Row, kernels: _Kernels, total_s: float, tokens: float | None) -> RowTime:
    return RowTime(
        row=row,
        share=round(kernels.seconds / total_s, 4),
        average_us=round(kernels.seconds / kernels.calls * 1e6, 3),
        calls_per_token=_each(tokens, kernels.calls),
        token_ms=_ms(tokens, kernels.seconds),
    )


def _each(number: float | None, count: int | None) -> float | None:
    """Return `count` divided by a number of steps or tokens; None if one of them is unknown."""
    if number is None or count is None:
        return None
    return round(count / number, 2)


def _ms(number: float | None, seconds: float | None) -> float | None:
    """Return `seconds` divided by a number of steps or tokens, in ms; None if one is unknown."""
    if number is None or seconds is None:
        return None
    return round(seconds / number * 1e3, 4)


def _overlap(profile: KernelProfile) -> float | None:
    """Return the fraction by which the sum of all kernels' times exceeds the busy time."""
    if profile.host is None or profile.host.busy_s <= 0:
        return None
    return round(max(profile.seconds / profile.host.busy_s - 1.0, 0.0), 4)


def _moe_layer_ms(profile: KernelProfile) -> float | None:
    """Return the time of both products of a layer, in one step."""
    products = profile.products
    if products is None:
        return None
    return round((products.first_s + products.second_s) / products.pairs * 1e3, 4)


def follows(time: DecodeTime) -> list[str]:
    """Return a line for each row of the plan's decision table that applies to a decode step.

    Args:
        time: The times of the step.
    """
    shares = {row.row: row.share for row in time.rows}
    lines = []
    for decision in decode_parts.load().decision:
        share = sum(shares.get(row, 0.0) for row in decision.rows)
        if share <= decision.share:
            continue
        if decision.rows == ("host",) and time.clock == "profiler":
            lines.append(
                f"{decision.what} takes at most {share:.0%} of the step: a trace includes the cost "
                "of the profiler, which slows the host. Profile the server or the configuration: "
                "both are also timed without the profiler"
            )
        else:
            lines.append(
                f"{decision.what} takes {share:.0%} of the {time.of} (more than "
                f"{decision.share:.0%}): {decision.then}"
            )
    return lines


@dataclass(frozen=True)
class Limits:
    """The limits of a decode.

    Attributes:
        token_ms: The maximum time of a token; None: there is none.
        token_source: The source of this limit, or the reason why there is none.
        moe_ms: The maximum time of both products of the experts of one layer, for one token; None:
            the model has no experts.
    """

    token_ms: float | None
    token_source: str
    moe_ms: float | None


@dataclass
class Judgement:
    """The result of judging a decode.

    Attributes:
        faults: A line for each requirement that is not met.
        not_run: A line for each requirement that could not be judged, with the reason.
    """

    faults: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)


def judge(
    profile: KernelProfile, time: DecodeTime, limits: Limits, *, backends: Sequence[str] = ()
) -> Judgement:
    """Judge the backend of the experts, the times of a token and of the experts, and the host.

    Args:
        profile: The kernels.
        time: Their times.
        limits: The limits.
        backends: The requested backends of the experts; empty if they are unknown.
    """
    judgement = Judgement()
    if backends:
        _judge_backend(judgement, profile, backends)
    unusable = ""
    if time.steps is None:
        unusable = (
            f"a profile that marks decode steps, got {profile.source}, which marks none. "
            "Give a trace of vLLM's profiler, or name the server or the configuration"
        )
    elif profile.prefill_steps:
        unusable = (
            f"a profile of decode steps alone, {profile.source} has {profile.prefill_steps} with a "
            "prefill. Start the profiler after the first token, and send no other request"
        )
    if unusable:
        judgement.not_run.append(
            f"limits of a token, the experts and the host: expected {unusable}"
        )
        return judgement
    if limits.moe_ms is not None:
        _judge_experts(judgement, profile, time, limits.moe_ms)
    _judge_token(judgement, profile, time, limits)
    _judge_host(judgement, time)
    return judgement


def _judge_backend(judgement: Judgement, profile: KernelProfile, backends: Sequence[str]) -> None:
    """Judge whether the requested backends, and no others, run the experts."""
    asked = " or ".join(backends)
    others: dict[str, str] = {}
    is_requested_there = False
    for kernel in profile.kernels:
        entry = entry_of(kernel.name)
        if entry is None or entry.part != "moe" or entry.backend is None:
            continue
        if any(entry.belongs_to(backend) for backend in backends):
            is_requested_there = True
        else:
            others.setdefault(entry.id, kernel.name[:_LONGEST_NAME])
    for kind, name in others.items():
        judgement.faults.append(f"MoE: expected kernels of {asked}, got {kind}: {name}")
    if is_requested_there or others:
        return
    text = f"MoE: expected kernels of {asked}, got none"
    if profile.cut_names():
        judgement.not_run.append(
            f"{text}, but {len(profile.cut_names())} names of kernels are truncated. Give a trace, "
            "or the CSV of nsys"
        )
    else:
        longest = ", ".join(name[:_SHORT_NAME] for name in profile.names()[:_NAMED_KERNELS])
        judgement.faults.append(f"{text}; the longest are {longest}")


def _judge_experts(
    judgement: Judgement, profile: KernelProfile, time: DecodeTime, limit: float
) -> None:
    """Judge the time of the experts' products."""
    name = "MoE GEMM at batch 1"
    took = time.moe_layer_ms
    if took is None:
        if any(decode_parts.is_product(kernel.name) for kernel in profile.kernels):
            reason = "expected launches in pairs of FC1 and FC2, got others"
        else:
            reason = "expected kernels of the experts' products, got none"
        judgement.not_run.append(f"{name}: {reason}. Profile whole decode steps of the model")
        return
    tokens = profile.step_tokens or 1
    if took > limit * tokens:
        judgement.faults.append(
            f"{name}: expected at most {limit:g} ms a layer, got {took / tokens:.3g} ms"
        )
    elif took > limit:
        judgement.not_run.append(
            f"{name}: expected at most {limit:g} ms a layer, got {took:.3g} ms for the {tokens} "
            "tokens of a step. Profile a server without speculative decoding"
        )


def _judge_token(
    judgement: Judgement, profile: KernelProfile, time: DecodeTime, limits: Limits
) -> None:
    """Judge the time of a token that was measured without the profiler.

    If there is no such measurement, judge the time of the token's kernels in the trace.
    """
    limit = limits.token_ms
    if limit is None:
        judgement.not_run.append(f"decode: {limits.token_source}")
        return
    expected = f"decode: expected at most {limit:g} ms a token ({limits.token_source})"
    if time.token_ms is not None:
        if time.token_ms > limit:
            judgement.faults.append(f"{expected}, got {time.token_ms:.3g} ms")
        return
    # In a trace, the time of a step includes the cost of the profiler, so only the time of its
    # kernels is compared.
    busy_ms = time.busy_ms or 0.0
    least = time.token_busy_ms or busy_ms / (profile.step_tokens or 1)
    if least > limit and (time.token_busy_ms is not None or profile.step_tokens is not None):
        judgement.faults.append(f"{expected}, its kernels took {least:.3g} ms")
    elif profile.decoding:
        judgement.not_run.append(
            f"{expected}, but the server does not count the tokens of its stream "
            "(continuous_usage_stats), so that no token was timed"
        )
    elif time.token_busy_ms is None and busy_ms > limit:
        judgement.not_run.append(
            f"{expected}, the kernels of a step took {busy_ms:.3g} ms, and the trace does not show "
            "how many tokens a step generates. Name the server or the configuration"
        )
    elif (time.traced_step_ms or 0.0) / (profile.step_tokens or 1) > limit:
        judgement.not_run.append(
            f"{expected}, a step of the trace took {time.traced_step_ms:.3g} ms with the cost of "
            "the profiler. Name the server or the configuration: both are also timed without it"
        )


def _judge_host(judgement: Judgement, time: DecodeTime) -> None:
    """Judge the share of a step in which no kernel ran."""
    gates = decode_parts.load().gates
    share = time.host_share
    if share is None or time.step_ms is None:
        judgement.not_run.append(
            "host: the share is unknown, because the trace contains no start times of kernels"
        )
        return
    if share <= gates.host_share or share * time.step_ms < gates.host_ms:
        return
    expected = f"host: expected at most {gates.host_share:.0%} of a step, got"
    if time.clock == "stream":
        judgement.faults.append(f"{expected} {share:.1%} ({share * time.step_ms:.3g} ms)")
    elif time.token_ms is None:
        judgement.not_run.append(
            f"{expected} {share:.1%} with the cost of the profiler. Name the server or the "
            "configuration: both are also timed without the profiler"
        )
    else:
        judgement.not_run.append(
            f"{expected} {share:.1%} with the cost of the profiler; without it, the time of a step "
            "is unknown, because the server's /metrics do not show how many tokens a step generates"
        )
