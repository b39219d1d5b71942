"""Divide the time of a decode step into parts and the host's share, and evaluate both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sm121.core.data_file import Record
from sm121.evidence import decode_parts
from sm121.evidence.decode_parts import ROWS, Row
from sm121.evidence.kernel_names import entry_of
from sm121.evidence.kernel_profile import HostTime, KernelProfile

#: The maximum length of a kernel's name in a message, in characters.
_LONGEST_NAME = 120
#: A step may be shorter than its kernels by this share, as their times vary between steps.
_TOLERANCE = 0.05


class RowTime(Record):
    """A row of the table."""

    row: Row
    share: float
    """The share of a step, or of the time of all kernels if the steps' times are unknown."""
    average_us: float | None
    """The mean time of a launch; null for the host."""
    calls_per_token: float | None
    """Null for the host, and if the profile does not mark steps."""
    token_ms: float | None
    """Milliseconds for each decoded token; null if the profile does not mark steps."""


class DecodeTime(Record):
    """The times of decode steps of one request."""

    of: str
    """The whole to which the shares refer: ``step`` or ``kernels``."""
    steps: int | None
    step_ms: float | None
    """Milliseconds from the start of a step to the start of the next one."""
    clock: Literal["stream", "profiler"] | None
    """The clock of ``step_ms``. ``stream``: the tokens' arrival before the profiler was started.
    ``profiler``: the trace, in which steps are longer, since a profiler slows the host."""
    traced_step_ms: float | None
    """Milliseconds of a step in the trace."""
    busy_ms: float | None
    """Milliseconds of a step in which a kernel ran."""
    overlap: float | None
    """The share by which the sum of all kernels' times exceeds the time in which a kernel ran."""
    host_share: float | None
    """The share of a step in which no kernel ran; null if it is unknown. If ``clock`` is
    ``profiler``, it includes the cost of the profiler."""
    launches: float | None
    """The number of launches of kernels or graphs by the host, per step."""
    kernels: float | None
    """The number of kernels that ran, per step."""
    moe_layer_ms: float | None
    """The time of both products of the experts of one layer, for one token."""
    rows: list[RowTime]
    """The rows of the table that have any time."""


@dataclass(frozen=True)
class _Kernels:
    """The sum of a row's kernels."""

    calls: int
    seconds: float


def measure(profile: KernelProfile, token_s: float | None = None) -> DecodeTime | None:
    """Divide the time of decode steps into the rows of the table.

    Args:
        profile: The kernels of some decode steps of one request.
        token_s: Seconds from one token to the next without the profiler; None: unknown.

    Returns:
        The times; None for a CPU's profile, which has operators instead of kernels.
    """
    if profile.kind != "gpu":
        return None
    steps = profile.steps
    host = profile.host
    by_row = _by_row(profile)
    clock: Literal["stream", "profiler"] | None = None if host is None else "profiler"
    total_s = profile.seconds if host is None else host.wall_s
    timed_s = None if host is None else _timed_s(token_s, steps, host)
    if timed_s is not None:
        clock = "stream"
        total_s = timed_s
    rows = []
    for row in ROWS:
        kernels = by_row.get(row)
        if kernels is not None and total_s > 0:
            rows.append(_row_time(row, kernels, total_s, steps))
    host_share = None
    step_ms = None
    if host is not None and host.wall_s > 0:
        idle_s = total_s - host.busy_s
        host_share = round(idle_s / total_s, 4)
        step_ms = _ms(steps, total_s)
        rows.append(
            RowTime(
                row="host",
                share=host_share,
                average_us=None,
                calls_per_token=None,
                token_ms=_ms(steps, idle_s),
            )
        )
    return DecodeTime(
        of="kernels" if host is None else "step",
        steps=steps,
        step_ms=step_ms,
        clock=clock,
        traced_step_ms=_ms(steps, None if host is None else host.wall_s),
        busy_ms=_ms(steps, None if host is None else host.busy_s),
        overlap=_overlap(profile),
        host_share=host_share,
        launches=_each(steps, None if host is None else host.launches),
        kernels=_each(steps, sum(kernel.calls for kernel in profile.kernels)),
        moe_layer_ms=_moe_layer_ms(profile),
        rows=rows,
    )


def _timed_s(token_s: float | None, steps: int | None, host: HostTime) -> float | None:
    """Return the seconds of all steps without the profiler; None if they are unknown.

    With speculative decoding, a step generates several tokens. The time per token is then shorter
    than the kernels of a step, and says nothing about the time of a step.
    """
    if token_s is None or steps is None or token_s * steps < host.busy_s * (1 - _TOLERANCE):
        return None
    return max(token_s * steps, host.busy_s)


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


def _row_time(row: Row, kernels: _Kernels, total_s: float, steps: int | None) -> RowTime:
    return RowTime(
        row=row,
        share=round(kernels.seconds / total_s, 4),
        average_us=round(kernels.seconds / kernels.calls * 1e6, 3),
        calls_per_token=_each(steps, kernels.calls),
        token_ms=_ms(steps, kernels.seconds),
    )


def _each(steps: int | None, count: int | None) -> float | None:
    """Return a count per step."""
    if steps is None or count is None:
        return None
    return round(count / steps, 2)


def _ms(steps: int | None, seconds: float | None) -> float | None:
    """Return the milliseconds per step."""
    if steps is None or seconds is None:
        return None
    return round(seconds / steps * 1e3, 4)


def _overlap(profile: KernelProfile) -> float | None:
    """Return the share by which the sum of the kernels' times exceeds the busy time."""
    if profile.host is None or profile.host.busy_s <= 0:
        return None
    return round(max(profile.seconds / profile.host.busy_s - 1.0, 0.0), 4)


def _moe_layer_ms(profile: KernelProfile) -> float | None:
    """Return the time of both products of a layer, for one token."""
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


def faults(profile: KernelProfile, time: DecodeTime, *, backends: Sequence[str] = ()) -> list[str]:
    """Return a line for each fault: kernels of another backend, and exceeded limits of the guide.

    Args:
        profile: The kernels.
        time: Their times.
        backends: The requested backends of the experts; empty: unknown.
    """
    gates = decode_parts.load().gates
    found = [] if not backends else _of_others(profile, backends)
    if time.moe_layer_ms is not None and time.moe_layer_ms > gates.moe_ms:
        found.append(
            f"MoE GEMM at batch 1: expected at most {gates.moe_ms:g} ms a layer, got "
            f"{time.moe_layer_ms:.3g} ms"
        )
    # A step in a trace includes the cost of the profiler: only its kernels are certain.
    token_ms = time.busy_ms if time.clock == "profiler" else time.step_ms
    if token_ms is not None and token_ms > gates.token_ms:
        found.append(
            f"decode: expected at most {gates.token_ms:g} ms a token, got {token_ms:.3g} ms"
        )
    return found


def _of_others(profile: KernelProfile, backends: Sequence[str]) -> list[str]:
    """Return a line for each kind of MoE kernel that no requested backend runs."""
    found: dict[str, str] = {}
    for kernel in profile.kernels:
        entry = entry_of(kernel.name)
        if entry is None or entry.part != "moe" or entry.backend is None:
            continue
        if not any(entry.belongs_to(backend) for backend in backends):
            found.setdefault(entry.id, kernel.name[:_LONGEST_NAME])
    asked = " or ".join(backends)
    return [f"MoE: expected kernels of {asked}, got {kind}: {name}" for kind, name in found.items()]
