"""What follows from a kernel path that was read from a log: how fast it can be at most, and what to
type next."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from sm121.core import builds, data_file, engine_arguments, profile
from sm121.core.engine_settings import PathValues
from sm121.core.errors import UsageError
from sm121.engines import requantised, requested, served_model
from sm121.evidence import signatures
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_path import KernelPath
from sm121.measure import roofline

_ARCH = "sm121"
#: Values that the log of every start has.
_MAIN = ("version", "model", "attention", "moe", "kv_cache_dtype", "cuda_graphs", "speculative")
_URL = "http://localhost:8000"


class Bound(data_file.Record):
    """The most tokens a second of one stream on a healthy GB10."""

    bytes_per_token: int
    """What the server reads for a token, by its model, its layers and their formats."""
    gb_s: float
    """The fastest that a healthy machine reads its memory."""
    tok_s: float
    text: str


class LogSource(NamedTuple):
    """Where the log came from: a file or a container; neither: standard input."""

    file: Path | None = None
    container: str | None = None


def bound(path: KernelPath) -> Bound | None:
    """The bound of a server by its log; None where the log does not show a known model, its experts
    and which layers are quantised, or where the server speculates."""
    config = roofline.read_config(path.model) if path.model is not None else None
    own = profile.load(profile.for_architecture(_ARCH))
    if config is None or path.moe is None or own.box is None or own.box.healthy_gb_s is None:
        return None
    if path.asked is None and not path.requantised_is_whole:
        return None
    arguments = requested.arguments_in_log(path)
    layout = roofline.served(config, arguments, PathValues(), path)
    if layout is None:
        return None
    read = roofline.traffic(config, depth=0, formats=layout)
    gb_s = own.box.healthy_gb_s.high
    tok_s = roofline.Ceiling(read, gb_s, 1.0).tok_s
    text = f"{read.total / 1e9:.2f} GB a token: {tok_s:.3g} tok/s at most on a GB10 ({gb_s:g} GB/s)"
    options = engine_arguments.read(arguments)
    layers = requantised.served_layers(config, options, None, path) or {}
    if not path.requantised_is_whole and (unproven := {*layers} - {*(path.requantised or ())}):
        text += f", if {', '.join(sorted(unproven))} are quantised as requested"
    fewer = _fewer_bytes(own, path, config, read.total)
    return Bound(
        bytes_per_token=round(read.total),
        gb_s=gb_s,
        tok_s=round(tok_s, 1),
        text=f"{text}{fewer}",
    )


def _fewer_bytes(
    own: profile.Profile, path: KernelPath, config: dict[str, object], total: float
) -> str:
    """The configuration of the profile that reads the least, where that is less."""
    try:
        judged = own.judging(None, builds.identity(path.version, build=path.build))
    except UsageError:
        return ""
    best, least = "", total
    for name in (*judged.configurations, *judged.lacking):
        cost = roofline.cost(judged, name, 0, config)
        if cost is not None and cost.total < 0.99 * least:
            best, least = name, cost.total
    if not best:
        return ""
    options = roofline.byte_options({**judged.lacking, **judged.configurations}[best].arguments)
    where = ", which this release lacks," if best in judged.lacking else ""
    return f"; configuration {best} ({options}){where} reads {least / 1e9:.2f}"


def missing(path: KernelPath) -> list[str]:
    """The main values of a path that no line of the log shows, ``version`` among them."""
    return [name for name in _MAIN if getattr(path, name) is None]


def remedies(path: KernelPath, engine: str) -> list[str]:
    """What is known to avoid each fallback that the log admits."""
    known = {
        entry.id: entry.remedy
        for entry in signatures.load_signatures(engine).signature
        if entry.remedy is not None
    }
    return [known[name] for name in path.fallbacks if name in known]


def next_step(path: KernelPath, engine: str, cause: Cause | None, source: LogSource) -> str:
    """What to do next, as a command where one follows from the path."""
    if cause is not None:
        return cause.remedy or f"ask {cause.owner}"
    if not _is_judged(path.model):
        return (
            f"no profile of the suite judges {path.model}: write one (docs/extending.md), or read "
            "each value's line with --json"
        )
    if known := remedies(path, engine):
        return f"start the server with {known[0]}"
    if path.version is None or (path.attention is None and path.moe is None):
        return "give the log from the start of the server on: docker logs NAME 2>&1 | sm121 path -"
    words = ["sm121", "run", "--base-url", _address(path)]
    if source.container is not None:
        words += ["--container", source.container]
    elif source.file is not None:
        words += ["--server-log", str(source.file)]
    return shlex.join(words)


def _is_judged(model: str | None) -> bool:
    """Whether a model may be that of a shipped profile: by its name, or where it is not known."""
    served = {each.model.served_name for each in map(profile.load, profile.shipped())}
    return model is None or any(served_model.is_named(model, name) for name in served)


def _address(path: KernelPath) -> str:
    port = requested.in_log(path, "port")
    return re.sub(r"\d+$", port, _URL) if port is not None and port.isdecimal() else _URL
