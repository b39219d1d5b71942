"""What the kernels of a profile prove of the path where no line of a log shows it. The layers that
are quantised beyond the checkpoint, by the calls of dense Marlin a decoded token (73 with qkv, o
and lm_head of 36 layers), and the variant of the experts' first product."""

from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.kernel_profile import KernelProfile, KernelTime, entry_of


def with_kernels(path: KernelPath, seen: KernelProfile, layers: int | None) -> KernelPath:
    """The path with what the kernels prove of it, each with its evidence. A log that says something
    else stays in ``also``. `layers`: of the model; None where they are not known."""
    proven: dict[str, list[str] | str | None] = {
        "requantised": None if layers is None else requantised(seen, layers),
        "moe_variant": moe_variant(seen),
    }
    path = path.model_copy(deep=True)
    for name, value in proven.items():
        if value is None:
            continue
        logged, by_kernels = (
            [one] if isinstance(one, str) else one or [] for one in (getattr(path, name), value)
        )
        if not set(logged) <= set(by_kernels):  # a log may show some of the layers
            path.also[name] = logged
            path.evidence[f"{name}_also"] = path.evidence.get(name, "the log")
        setattr(path, name, value)
        path.requantised_is_whole |= name == "requantised"
        path.evidence[name] = f"{seen.source}: {_shown(seen, name, value, layers)}"
    return path


def moe_variant(seen: KernelProfile) -> str | None:
    """``fused`` where the experts' first product has the activation in it, else ``unfused``; None
    where no kernel tells, as where names are cut."""
    if _rows(seen, "fused"):
        return "fused"
    return "unfused" if _rows(seen, "unfused") and not seen.cut_names() else None


def requantised(seen: KernelProfile, layers: int) -> list[str] | None:
    """Which of ``qkv``, ``o``, ``lm_head`` run on dense Marlin, of a checkpoint whose experts alone
    are quantised; None where the calls prove nothing. The measure is one write into the KV cache a
    layer and pass. ``qkv`` alone is not told from ``o`` alone. `layers`: of the model."""
    passes, rest = divmod(sum(row.calls for row in _rows(seen, "layer_pass")), layers)
    if rest or not passes:
        return None
    rows = [row.calls for row in _rows(seen, "requantised")]
    if not rows:
        dense = sum(row.calls for row in _rows(seen, "plain"))
        others = _rows(seen, "quantised") or seen.cut_names()
        return [] if dense >= 3 * layers * passes and not others else None  # qkv, o and router
    # Where steps are marked, passes beyond them are prefill.
    decoding = seen.decoding or (seen.steps or 0) - passes in (0, 1)
    calls = sum(rows) / passes if decoding else _calls_a_token(seen, rows, passes, layers)
    provable = (["lm_head"], ["qkv", "o"], ["qkv", "o", "lm_head"])
    counts = (1, 2 * layers, 2 * layers + 1)
    return next(
        (names for count, names in zip(counts, provable, strict=True) if count == calls), None
    )


def _calls_a_token(seen: KernelProfile, rows: list[int], passes: int, layers: int) -> int | None:
    """Of a table that has prefill in it. A product of every layer has a row with as many calls as
    decoding attention, the commonest and shortest; lm_head has one more a pass."""
    attention = [
        row
        for row in seen.kernels
        if row.part == "attention" and (entry := entry_of(row.name)) and entry.backend
    ]
    decode = max(attention, key=lambda row: (row.calls, row.seconds), default=None)
    if decode is None or 2 * decode.calls <= passes * layers:
        return None
    prefill = [row for row in attention if row.calls < decode.calls]
    if not prefill or any(_mean(row) <= _mean(decode) for row in prefill):
        return None
    heads = {0: 0, passes % layers: 1}.get(sum(rows) % layers) if passes % layers else None
    if heads is None:
        return None
    products = sum(calls in (decode.calls, decode.calls + passes) for calls in rows)
    if products == 0 and sum(rows) != passes:
        return None
    return products * layers + heads


def _rows(seen: KernelProfile, proof: str) -> list[KernelTime]:
    entries = ((row, entry_of(row.name)) for row in seen.kernels)
    return [row for row, entry in entries if entry is not None and entry.proves == proof]


def _mean(row: KernelTime) -> float:
    return row.seconds / max(row.calls, 1)


def _shown(seen: KernelProfile, name: str, value: list[str] | str, layers: int | None) -> str:
    if name == "moe_variant":
        return _rows(seen, str(value))[0].name[:300]
    marlin, writes = _rows(seen, "requantised"), _rows(seen, "layer_pass")
    calls, passes = (sum(row.calls for row in rows) for rows in (marlin, writes))
    return (
        f"{calls} calls of dense Marlin in {passes // (layers or 1)} passes of {layers} layers: "
        f"{', '.join(value) or 'no layer'} beyond the checkpoint"
    )
