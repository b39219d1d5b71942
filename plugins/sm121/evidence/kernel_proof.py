"""The values of a kernel path that the kernels of a profile prove, where no log line shows them.

* The layers that are quantised beyond the checkpoint, by the calls of dense Marlin for each decoded
  token: 73 with qkv, o and lm_head of 36 layers.
* The variant of the experts' first product.
"""

from collections.abc import Sequence

from sm121.evidence.kernel_names import Proof, entry_of
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.kernel_profile import KernelProfile, KernelTime

#: Characters of a kernel's name in the evidence.
_LONGEST_NAME = 300


def with_kernels(path: KernelPath, profile: KernelProfile, layers: int | None) -> KernelPath:
    """Add the values that the kernels prove to a kernel path.

    Args:
        path: The path that the log proves. It is not changed.
        profile: The kernels.
        layers: The layers of the model. None: not known.

    Returns:
        A copy with the proven values and their evidence. If the log has another value, that value
        is in ``also``.
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
    """Keep the values of the log in ``also``, unless the kernels prove them too.

    A log may show some of the layers only.
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
        ``fused`` if a kernel has the activation in it, else ``unfused``. None: no kernel shows it,
        or names are cut.
    """
    if _rows(profile, "fused"):
        return "fused"
    if _rows(profile, "unfused") and not profile.cut_names():
        return "unfused"
    return None


def requantised(profile: KernelProfile, layers: int) -> list[str] | None:
    """Find which of ``qkv``, ``o`` and ``lm_head`` run on dense Marlin.

    The checkpoint quantises the experts only. Each layer writes into the KV cache once a pass,
    which gives the number of passes. ``qkv`` alone and ``o`` alone have the same number of calls.

    Args:
        profile: The kernels.
        layers: The layers of the model.

    Returns:
        The layers; None if the calls prove nothing.
    """
    passes, rest = divmod(_calls(_rows(profile, "layer_pass")), layers)
    if rest or not passes:
        return None
    marlin = _rows(profile, "requantised")
    if not marlin:
        return [] if _all_is_plain(profile, layers, passes) else None
    # If steps are marked, passes beyond them are prefill.
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
    """Whether qkv, o and the router of each layer run in BF16."""
    if _rows(profile, "quantised") or profile.cut_names():
        return False
    return _calls(_rows(profile, "plain")) >= 3 * layers * passes


def _calls_a_token(
    profile: KernelProfile, marlin: Sequence[KernelTime], passes: int, layers: int
) -> int | None:
    """Return the calls of dense Marlin for each decoded token, from a profile with prefill in it.

    A product of every layer has a row with as many calls as decoding attention, which is the
    commonest and shortest attention. lm_head has one call more each pass.
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
    """Whether a kernel is of attention, of a backend that alone runs it."""
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
