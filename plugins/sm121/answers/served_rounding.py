"""Determine how a server rounds values, in addition to the checkpoint's own quantisation.

The formats come from the server's kernel path, its arguments, or the required path of its
configuration. The oracle then rounds in the same way. If none of these sources shows a format, the
format is not guessed.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from sm121.core import builds, data_file, engine_arguments
from sm121.core.data_file import DataTable, Regex
from sm121.core.engine_settings import PathValues
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.core.verdict import NotRun
from sm121.core.versions import Versions, within
from sm121.engines.requantised import served_layers
from sm121.evidence.kernel_path import KernelPath
from sm121.oracles.formats import CHECKPOINT, Rounding

#: KV-cache dtypes without further rounding, because the cache has the format of the arithmetic.
_PLAIN_CACHES = ("auto", "bfloat16", "float32", "float16", "bf16", "f16", "f32")


class _Row(DataTable):
    """How engines round a part of the model in a format: a row of ``fixtures/roundings.toml``."""

    part: Literal["dense", "kv", "experts"]
    #: A pattern that the name of the format must match.
    when: Regex
    attention: Regex | None = None
    #: The name of the only build to which the row applies; None for all builds.
    build: str | None = None
    versions: Versions = ""
    rounding: str
    source: str = Field(min_length=3)

    def fits(self, part: str, form: str, attention: str, identity: str | None) -> bool:
        """Return whether the row applies to a part with a format, for a build of the engine."""
        if self.part != part or self.when.fullmatch(form) is None:
            return False
        if self.attention is not None and self.attention.fullmatch(attention) is None:
            return False
        if self.build is not None:
            build = builds.named(identity)
            if build is None or build.name != self.build:
                return False
        return within(identity, self.versions)


def served_rounding(
    server: Server, profile: Profile, path: KernelPath, config: Mapping[str, Any]
) -> Rounding:
    """Return the formats with which a server computes. The arithmetic itself counts as exact.

    A format is taken from the kernel path. If the kernel path does not show it, it is taken from
    the server's arguments, or else from the required path of the profile's configuration.

    Args:
        server: The server.
        profile: The profile.
        path: The kernel path of the server.
        config: The config.json of the served model.

    Raises:
        NotRun: A format is unknown. The message names the option with which the user can state it.
    """
    options = engine_arguments.parse_options(profile.arguments_of(server.configuration))
    return rounding_of(options, profile.path_of(profile.under_test), path, config)


def rounding_of(
    options: Mapping[str, str], required: PathValues, path: KernelPath, config: Mapping[str, Any]
) -> Rounding:
    """Return the formats of a server, like `served_rounding`.

    Args:
        options: The arguments of the server (`engine_arguments.parse_options`).
        required: The required path of the configuration.
        path: The kernel path of the server.
        config: The config.json of the served model.

    Raises:
        NotRun: A format is not shown.
    """
    identity = builds.identity(path.log.version, build=path.log.build)

    def find_rounding(part: str, formats: Iterable[str]) -> str:
        """Return the rounding of a part.

        If several formats are possible, all must have the same rounding.
        """
        values = {_find_rounding(part, form, path.attention, identity) for form in formats}
        if len(values) > 1:
            raise _not_shown(part, f"which of {', '.join(formats)} runs")
        return values.pop()

    layers = served_layers(config, options, required.requantised, path)
    if layers is None:
        layer_names = ", ".join(path.requantised or ()) or "quantisation at load"
        raise _not_shown("dense layers", f"the format of {layer_names}")
    chosen = {layer: find_rounding("dense", [form]) for layer, form in layers.items()}
    caches = _cache_formats(options, required, path)
    if caches != {"auto"}:
        if options.get("calculate_kv_scales", "false") != "false":
            raise _not_shown("KV cache", "scales that are computed from the first prompt")
        chosen["kv"] = find_rounding("kv", sorted(caches))
    if path.moe is not None:
        experts = [path.moe]
    else:
        experts = list(required.moe or [options.get("moe_backend", "")])
    chosen["experts"] = find_rounding("experts", [name.upper() for name in experts])
    parts = [f"{part}={value}" for part, value in chosen.items() if value]
    return Rounding.parse(",".join(parts) or CHECKPOINT)


def activations_of(moe: str | None, dtype: str | None, identity: str | None) -> str | None:
    """Return the format of the experts' inputs, for tables: a rounding, or the model's dtype.

    Args:
        moe: The backend of the experts, as the kernel path shows it.
        dtype: The dtype of the model, as the kernel path shows it.
        identity: The engine's `builds.identity`.

    Returns:
        The format; None if the path does not show it.
    """
    if moe is None:
        return None
    try:
        return _find_rounding("experts", moe, None, identity) or dtype
    except NotRun:
        return None


def _cache_formats(options: Mapping[str, str], required: PathValues, path: KernelPath) -> set[str]:
    """Return the possible formats of the KV cache; "auto" means the format of the arithmetic."""
    shown = path.kv_cache_dtype or options.get("kv_cache_dtype")
    formats = [shown] if shown is not None else required.kv_cache_dtype or ["auto"]
    return {"auto" if name in _PLAIN_CACHES else name for name in formats}


def _find_rounding(part: str, form: str, attention: str | None, identity: str | None) -> str:
    for row in data_file.load_key("roundings.toml", "row", tuple[_Row, ...]):
        if row.fits(part, form, attention or "", identity):
            return row.rounding
    engine = identity or "an unknown release"
    raise _not_shown(part, f"how {form} rounds in {engine} with attention {attention}")


def _not_shown(part: str, observed: str) -> NotRun:
    return NotRun(
        "the oracle must round as the server does, but the server's kernel path does not show "
        f"{observed} ({part}); name it with --rounding LIST, such as qkv=mxfp4-ceil,kv=fp8, or "
        "--rounding checkpoint"
    )
