"""What a server rounds beyond the checkpoint, by its kernel path and its arguments. The oracle
rounds in the same way; what does not show is not guessed."""

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

#: Formats of a KV cache that are those of the arithmetic.
_PLAIN_CACHES = ("auto", "bfloat16", "float32", "float16", "bf16", "f16", "f32")


class _Row(DataTable):
    part: Literal["dense", "kv", "experts"]
    when: Regex
    attention: Regex | None = None
    build: str | None = None
    versions: Versions = ""
    rounding: str
    source: str = Field(min_length=3)

    def fits(self, part: str, form: str, attention: str, identity: str | None) -> bool:
        build = builds.named(identity)
        return (
            self.part == part
            and self.when.fullmatch(form) is not None
            and (self.attention is None or self.attention.fullmatch(attention) is not None)
            and self.build in (None, build and build.name)
            and within(identity, self.versions)
        )


def served_rounding(
    server: Server, profile: Profile, path: KernelPath, config: Mapping[str, Any]
) -> Rounding:
    """The formats that a server computes with, in exact arithmetic: what its path shows, else what
    it was started with, else what the path of the profile's configuration must show. `config`: of
    its model (config.json). Raises NotRun: something of it does not show; it names the option that
    tells it."""
    options = engine_arguments.read(profile.arguments_of(server.configuration))
    return rounding_of(options, profile.path_of(profile.under_test), path, config)


def rounding_of(
    options: Mapping[str, str], required: PathValues, path: KernelPath, config: Mapping[str, Any]
) -> Rounding:
    """See `served_rounding`. `options`: of the server (`engine_arguments.read`); `required`: of its
    path."""
    identity = builds.identity(path.version, build=path.build)

    def rounding(part: str, formats: Iterable[str]) -> str:
        """Of a part in one of these formats. Raises NotRun: it is not known, or they differ."""
        values = {_rounding(part, form, path.attention, identity) for form in formats}
        if len(values) > 1:
            raise _not_shown(part, f"which of {', '.join(formats)} runs")
        return values.pop()

    if (layers := served_layers(config, options, required.requantised, path)) is None:
        layer_names = ", ".join(path.requantised or ()) or "quantisation at load"
        raise _not_shown("dense layers", f"the format of {layer_names}")
    chosen = {layer: rounding("dense", [form]) for layer, form in layers.items()}
    cache = path.kv_cache_dtype or options.get("kv_cache_dtype")
    caches = [cache] if cache is not None else required.kv_cache_dtype or ["auto"]
    caches = ["auto" if name in _PLAIN_CACHES else name for name in caches]
    if {*caches} != {"auto"}:
        if options.get("calculate_kv_scales", "false") != "false":
            raise _not_shown("KV cache", "scales that are computed from the first prompt")
        chosen["kv"] = rounding("kv", caches)
    moe = [path.moe] if path.moe is not None else required.moe or [options.get("moe_backend", "")]
    chosen["experts"] = rounding("experts", [name.upper() for name in moe])
    parts = (f"{part}={value}" for part, value in chosen.items() if value)
    return Rounding.parse(",".join(parts) or CHECKPOINT)


def _rounding(part: str, form: str, attention: str | None, identity: str | None) -> str:
    for row in data_file.load_key("roundings.toml", "row", tuple[_Row, ...]):
        if row.fits(part, form, attention or "", identity):
            return row.rounding
    engine = identity or "an unknown release"
    raise _not_shown(part, f"how {form} rounds in {engine} with attention {attention}")


def _not_shown(part: str, observed: str) -> NotRun:
    return NotRun(
        f"the oracle rounds as the server does, and its path does not show {observed} ({part}); "
        "tell it: --rounding LIST, as qkv=mxfp4-ceil,kv=fp8, or --rounding checkpoint"
    )
