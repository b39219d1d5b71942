"""What ``sm121 path`` and ``sm121 box`` print for people: one row for each question."""

from collections.abc import Collection, Iterable

from sm121.core.level_settings import Box
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_path import KernelPath
from sm121.measure.box import Judgement, Reading
from sm121.run.engine_report import NodeReport

_SILENT = "not proven: the log does not say"
_GRAPHS = {True: "captured", False: "off", None: _SILENT}
_FP4 = {True: "native FP4", False: "FP4 weights unpacked", None: None}


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Rows of a name and a text, in two columns."""
    lines = [*rows]
    width = max(len(name) for name, _ in lines)
    return "".join(f"{name:{width}}  {text}\n" for name, text in lines)


def of_path(
    path: KernelPath, contradictions: Collection[str] = (), cause: Cause | None = None
) -> list[tuple[str, str]]:
    """What runs, beside what was requested. `contradictions`: between the log and the kernels of a
    trace; `cause`: of the failure that the log shows, if it shows one."""
    layers = path.requantised
    rows = [
        ("attention", _with(path, "attention", path.attention)),
        ("MoE experts", _with(path, "moe", _joined(
            path.moe, path.moe_variant, path.moe_tiles and f"tiles {path.moe_tiles}",
            _FP4[path.native_fp4] if path.moe else None,
        ))),
        ("KV cache", _with(path, "kv_cache_dtype", _joined(
            path.kv_cache_dtype, path.kv_layout and f"layout {path.kv_layout}"
        ))),
        ("CUDA graphs", _with(path, "cuda_graphs", _GRAPHS[path.cuda_graphs])),
        ("quantised beyond the checkpoint", _with(
            path, "requantised", None if layers is None else ", ".join(layers) or "nothing"
        )),
        ("fallbacks", ", ".join([*path.fallbacks, *path.silent_fallbacks])
         or "none in the log"),
    ]  # fmt: skip
    rows += [("requested, and not what runs", line) for line in path.differences]
    rows += [("kernels contradict the log", line) for line in contradictions]
    if cause is not None:
        rows += [("failed", f"{cause.kind}: {cause.summary}"), ("ask", cause.owner)]
        rows += [("remedy", cause.remedy)] if cause.remedy else []
    return rows


def of_nodes(nodes: Iterable[NodeReport], unequal: Iterable[str] = ()) -> list[tuple[str, str]]:
    """A row for each rank of a server that spans machines, and for each difference or gap."""
    rows = [(f"rank {'?' if n.rank is None else n.rank}", f"{n.node}: {n}") for n in nodes]
    return rows + [("ranks", line) for line in unequal]


def _with(path: KernelPath, field: str, value: str | None) -> str:
    """A value with what was requested of it."""
    requests = "; ".join(
        report.message if report.state == "not_proven" else report.by
        for report in path.requested
        if report.field == field
    )
    also = f"; in some layers {', '.join(path.also[field])}" if field in path.also else ""
    return f"{value or _SILENT}{also}" + (f"   (requested: {requests})" if requests else "")


def _joined(*parts: str | None) -> str | None:
    return ", ".join(part for part in parts if part) or None


def of_box(reference: Box | None, reading: Reading, judgement: Judgement) -> list[tuple[str, str]]:
    """What the machine does now, beside the least that the profile requires, and the verdict."""
    rows = []
    for name, part, value, unit in (
        ("memory bandwidth", reading.device, "bandwidth_gb_s", "GB/s"),
        ("matrix rate", reading.device, "matrix_tflop_s", "TFLOP/s"),
        ("SM clock under load", reading.device, "sm_clock_mhz", "MHz"),
        ("memory available", reading, "memory_available_gib", "GiB"),
    ):
        measured, least = getattr(part, value, None), getattr(reference, value, None)
        text = "not measured" if measured is None else f"{measured:.4g} {unit}"
        rows.append((name, text + (f"   (required: {least.value:g})" if least else "")))
    others = [f"{reading.other_load:.0%} of the CPU", *reading.others]
    if reading.gpu_others:
        others.append(f"on the GPU processes {reading.gpu_others}")
    return [*rows, ("taken by others", ", ".join(others)),
            (judgement.state.value, judgement.reason)]  # fmt: skip
