"""Find values of the kernel path that the kernels of a profile prove, but that no log line shows.

* The layers that are quantised beyond the checkpoint. They are derived from the number of calls of
dense Marlin per decoded token. For example, 73 calls mean qkv and o in each of 36 layers, and
lm_head. * The variant of the experts' first product.
"""

from collections.abc import Sequence

from sm121.evidence.kernel_names import Proof, entry_of
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.kernel_profile import KernelProfile, KernelTime

#: The maximum length of a kernel's name in the evidence, in characters.
_LONGEST_NAME = 300


def with_kernels(path: KernelPath, profile: KernelProfile, layers: int | None) -> KernelPath:
    """Add the values that the kernels prove to a kernel path.

    Args:
        path: The path that the log proves. It is not modified.
        profile: The kernels.
        layers: The number of layers of the model. None if it is unknown.

    Returns:
        A copy with the proven values and their evidence. If the log shows another value, the field
        ``also`` contains it.
    """
    path = path.model_copy(deep=True)
    quantised = None if layers is None else requantised(profile, layers)
    if quantised is not None:
        _keep_logged(path, "requantised", path.requantised or [], quantised)
        path.requantised = quantised
        path.requantised_is_whole = True
        calls = _describe_calls(profile, quantised, layers)
        path.evidence["requantised"] = f"{profile.source}: {calls}"
    variant = moe_variant(profile)
    if variant is not None:
        logged = [] if path.moe_variant is None else [path.moe_variant]
        _keep_logged(path, "moe_variant", logged, [variant])
        path.moe_variant = variant
        kernel = _rows(profile, variant)[0].name[:_LONGEST_NAME]
        path.evidence["moe_variant"] = f"{profile.source}: {kernel}"
    return path


def _keep_logged(
    path: KernelPath, field: str, logged: Sequence[str], proven: Sequence[str]
) -> None:
    """Store the values from the log in ``also`` if the kernels do not prove all of them.

    If the log shows only some of the layers that the kernels prove, this is no contradiction.
    """
    if set(logged) <= set(proven):
        return
    path.also[field] = list(logged)
    path.evidence[f"{field}_also"] = path.evidence.get(field, "the log")


def moe_variant(profile: KernelProfile) -> Proof | None:
    """Return the variant of the experts' first product.

    Args:
        profile: The kernels.

    Returns:
        ``fused`` if a kernel includes the activation, else ``unfused``. None if no kernel shows the
        variant, or if names are truncated.
    """
    if _rows(profile, "fused"):
        return "fused"
    if _rows(profile, "unfused") and not profile.cut_names():
        return "unfused"
    return None


def requantised(profile: KernelProfile, layers: int) -> list[str] | None:
    """Find which of ``qkv``, ``o`` and ``lm_head`` run on dense Marlin.

    In the checkpoint, only the experts are quantised. The number of forward passes is derived from
    the writes into the KV cache, because each layer writes once per pass. If only one of ``qkv``
    and ``o`` is quantised, the calls do not show which one.

    Args:
        profile: The kernels.
        layers: The number of layers of the model.

    Returns:
        The layers; None if the calls do not prove them.
    """
    passes, rest = divmod(_calls(_rows(profile, "layer_pass")), layers)
    if rest or not passes:
        return None
    marlin = _rows(profile, "requantised")
    if not marlin:
        return [] if _all_is_plain(profile, layers, passes) else None
    # If the trace marks steps, the passes beyond the number of steps belong to prefill.
    is_decoding = profile.decoding or (profile.steps or 0) - passes in (0, 1)
    calls: float | None
    if is_decoding:
        calls = _calls(marlin) / passes
    else:
        calls = _calls_a_token(profile, marlin, passes, layers)
    if calls == 1:
        return ["lm_head"]
    if calls == 2 * layers:
        return ["qkv", "o"]
    if calls == 2 * layers + 1:
        return ["qkv", "o", "lm_head"]
    return None


def _all_is_plain(profile: KernelProfile, layers: int, passes: int) -> bool:
    """Return whether qkv, o and the router of each layer run in BF16."""
    if _rows(profile, "quantised") or profile.cut_names():
        return False
    return _calls(_rows(profile, "plain")) >= 3 * layers * passes


def _calls_a_token(
    profile: KernelProfile, marlin: Sequence[KernelTime], passes: int, layers: int
) -> int | None:
    """Return the number of calls of dense Marlin per decoded token, if a profile includes prefill.

    Decode attention is the attention kernel with the most calls and the shortest time. A matrix
    product that each layer computes has as many calls as decode attention. lm_head has one call per
    pass.
    """
    attention = [row for row in profile.kernels if _is_of_one_backend(row)]
    decode = max(attention, key=lambda row: (row.calls, row.seconds), default=None)
    if decode is None or 2 * decode.calls <= passes * layers:
        return None
    prefill = [row for row in attention if row.calls < decode.calls]
    if not prefill or any(_mean_s(row) <= _mean_s(decode) for row in prefill):
        return None
    head_calls = passes % layers
    if head_calls == 0:
        return None
    rest = _calls(marlin) % layers
    if rest not in (0, head_calls):
        return None
    heads = 1 if rest == head_calls else 0
    of_each_layer = (decode.calls, decode.calls + passes)
    products = len([row for row in marlin if row.calls in of_each_layer])
    if products == 0 and _calls(marlin) != passes:
        return None
    return products * layers + heads


def _is_of_one_backend(row: KernelTime) -> bool:
    """Return whether a kernel computes attention, and only one backend runs this kernel."""
    entry = entry_of(row.name)
    return row.part == "attention" and entry is not None and bool(entry.backend)


def _rows(profile: KernelProfile, proof: Proof) -> list[KernelTime]:
    rows: list[KernelTime] = []
    for row in profile.kernels:
        entry = entry_of(row.name)
        if entry is not None and entry.proves == proof:
            rows.append(row)
    return rows


def _calls(rows: Sequence[KernelTime]) -> int:
    return sum(row.calls for row in rows)


def _mean_s(row: KernelTime) -> float:
    return row.seconds / max(row.calls, 1)


def _describe_calls(profile: KernelProfile, quantised: Sequence[str], layers: int | None) -> str:
    calls = _calls(_rows(profile, "requantised"))
    passes = _calls(_rows(profile, "layer_pass")) // (layers or 1)
    return (
        f"{calls} calls of dense Marlin in {passes} passes of {layers} layers: "
        f"{', '.join(quantised) or 'no layer'} beyond the checkpoint"
    )
