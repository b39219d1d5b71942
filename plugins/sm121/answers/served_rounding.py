"""What a server rounds beyond the checkpoint, by its kernel path and its arguments. The oracle
rounds in the same way; what does not show is not guessed."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from sm121.core import builds, data_file
from sm121.core.data_file import DataTable, Regex
from sm121.core.engine_settings import PathValues
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.core.verdict import NotRun
from sm121.core.versions import Versions, within
from sm121.engines.requantised import served_layers
from sm121.engines.requested import read_arguments
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


def _rows() -> tuple[_Row, ...]:
    return data_file.load_key("roundings.toml", "row", tuple[_Row, ...])


def served_rounding(
    server: Server, profile: Profile, path: KernelPath, config: Mapping[str, Any]
) -> Rounding:
    """The formats that a server computes with, in exact arithmetic: what its path shows, else what
    it was started with, else what the path of the profile's configuration must show. `config`: of
    its model (config.json). Raises NotRun: something of it does not show; it names the option that
    tells it."""
    options = read_arguments(profile.arguments_of(server.configuration))
    return rounding_of(options, profile.path_of(profile.under_test), path, config)


def rounding_of(
    options: Mapping[str, str], required: PathValues, path: KernelPath, config: Mapping[str, Any]
) -> Rounding:
    """See `served_rounding`. `options`: of the server (`read_arguments`); `required`: of its
    path."""
    table = _Table(path, builds.identity(path.version, build=path.build))
    layers = served_layers(config, options, required.requantised, path)
    if layers is None:
        layer_names = ", ".join(path.requantised or ()) or "quantisation at load"
        raise _not_shown("dense layers", f"the format of {layer_names}")
    chosen = {layer: table.rounding("dense", [form]) for layer, form in layers.items()}
    cache = path.kv_cache_dtype or options.get("kv_cache_dtype")
    caches = [cache] if cache is not None else required.kv_cache_dtype or ["auto"]
    caches = ["auto" if name in _PLAIN_CACHES else name for name in caches]
    if {*caches} != {"auto"}:
        if options.get("calculate_kv_scales", "false") != "false":
            raise _not_shown("KV cache", "scales that are computed from the first prompt")
        chosen["kv"] = table.rounding("kv", caches)
    moe = [path.moe] if path.moe is not None else required.moe or [options.get("moe_backend", "")]
    chosen["experts"] = table.rounding("experts", [name.upper() for name in moe])
    parts = (f"{part}={value}" for part, value in chosen.items() if value)
    return Rounding.parse(",".join(parts) or CHECKPOINT)


class _Table:
    def __init__(self, path: KernelPath, identity: str | None) -> None:
        self._attention, self._identity = path.attention, identity

    def rounding(self, part: str, formats: Iterable[str]) -> str:
        """Of a part in one of these formats. Raises NotRun: it is not known, or they differ."""
        values = {self._of(part, form) for form in formats}
        if len(values) > 1:
            raise _not_shown(part, f"which of {', '.join(formats)} runs")
        return values.pop()

    def _of(self, part: str, form: str) -> str:
        for row in _rows():
            if row.fits(part, form, self._attention or "", self._identity):
                return row.rounding
        engine = self._identity or "an unknown release"
        raise _not_shown(part, f"how {form} rounds in {engine} with attention {self._attention}")


def _not_shown(part: str, observed: str) -> NotRun:
    return NotRun(
        f"the oracle rounds as the server does, and its path does not show {observed} ({part}); "
        "tell it: --rounding LIST, as qkv=mxfp4-ceil,kv=fp8, or --rounding checkpoint"
    )
