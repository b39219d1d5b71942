"""Conclusions from the kernel path in a server's log: the maximum rate, and the next command."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from sm121.core import builds, data_file, engine_arguments, profile
from sm121.core.engine_settings import PathValues
from sm121.core.errors import UsageError
from sm121.engines import requantised, requested, served_model
from sm121.evidence import kernel_path, signatures
from sm121.evidence.failure import Cause
from sm121.evidence.kernel_path import KernelPath
from sm121.machine import roofline

_ARCH = "sm121"
#: The device in the log of a GB10.
_GPU = "cuda"
#: Values of the kernel path that the log of every start should show.
_MAIN = ("version", "model", "attention", "moe", "kv_cache_dtype", "cuda_graphs", "speculative")
_URL = "http://localhost:8000"
#: A configuration counts as reading fewer bytes than another if it reads less than this fraction of
#: the other's bytes.
_FEWER = 0.99


class RateBound(data_file.Record):
    """The maximum tokens per second of one stream on a healthy GB10."""

    bytes_per_token: int
    """The bytes that the server reads per token, from its model, its layers and their formats."""
    gb_s: float
    """The maximum memory bandwidth of a healthy machine, in GB/s."""
    tok_s: float
    text: str
    """The bound as one line of text."""


class LogSource(NamedTuple):
    """The origin of a log: a file or a container; standard input if both are None."""

    file: Path | None = None
    container: str | None = None


def bound(path: KernelPath) -> RateBound | None:
    """Return the bound of a server's rate, from its log.

    Args:
        path: The kernel path in the log.

    Returns:
        The bound; None if the log does not show a known model, its experts and which layers are
        quantised, if the server speculates, or if its device is no GB10.
    """
    if path.log.device not in (None, _GPU):
        return None
    config = roofline.read_config(path.log.model) if path.log.model is not None else None
    own = profile.load(profile.for_architecture(_ARCH))
    if config is None or path.moe is None or own.box is None or own.box.healthy_gb_s is None:
        return None
    if path.log.asked is None and not path.requantised_is_whole:
        return None
    arguments = requested.arguments_in_log(path)
    layout = roofline.served(config, arguments, PathValues(), path)
    if layout is None:
        return None
    read = roofline.traffic(config, depth=0, formats=layout)
    gb_s = own.box.healthy_gb_s.high
    tok_s = roofline.Ceiling(read, gb_s, 1.0).tok_s
    text = f"{read.total / 1e9:.2f} GB a token: {tok_s:.3g} tok/s at most on a GB10 ({gb_s:g} GB/s)"
    options = engine_arguments.parse_options(arguments)
    layers = requantised.served_layers(config, options, None, path) or {}
    unproven = set(layers).difference(path.requantised or ())
    if unproven and not path.requantised_is_whole:
        text += f", if {', '.join(sorted(unproven))} are quantised as requested"
    fewer = _fewer_bytes(own, path, config, read.total)
    return RateBound(
        bytes_per_token=round(read.total),
        gb_s=gb_s,
        tok_s=round(tok_s, 1),
        text=f"{text}{fewer}",
    )


def _fewer_bytes(
    own: profile.Profile, path: KernelPath, config: dict[str, object], total: float
) -> str:
    """Return a text on the profile's configuration with the fewest bytes, if they are fewer."""
    try:
        judged = own.judging(None, builds.identity(path.log.version, build=path.log.build))
    except UsageError:
        return ""
    best = ""
    least = total
    for name in (*judged.configurations, *judged.lacking):
        cost = roofline.cost(judged, name, 0, config)
        if cost is not None and cost.total < _FEWER * least:
            best = name
            least = cost.total
    if not best:
        return ""
    options = roofline.byte_options({**judged.lacking, **judged.configurations}[best].arguments)
    where = ", which this release lacks," if best in judged.lacking else ""
    return f"; configuration {best} ({options}){where} reads {least / 1e9:.2f} GB"


def missing(path: KernelPath) -> list[str]:
    """Return the main values of a path that no line of the log shows.

    Args:
        path: The kernel path.

    Returns:
        The names of the path's fields, such as ``version``.
    """
    return [name for name in _MAIN if kernel_path.shown(path, name) is None]


def remedies(path: KernelPath, engine: str) -> list[str]:
    """Return the options that avoid the fallbacks in a log.

    Args:
        path: The kernel path.
        engine: The engine's name.
    """
    known = {}
    for entry in signatures.load_signatures(engine).signature:
        if entry.remedy is not None:
            known[entry.id] = entry.remedy
    return [known[name] for name in path.fallbacks if name in known]


def next_step(path: KernelPath, engine: str, cause: Cause | None, source: LogSource) -> str:
    """Return the next step, as a command if the path suggests one.

    Args:
        path: The kernel path.
        engine: The engine's name.
        cause: The cause of the server's death, if the log shows one.
        source: The origin of the log.
    """
    if cause is not None:
        return cause.remedy or f"ask {cause.owner}"
    if not _is_judged(path.log.model):
        return (
            f"the suite has no profile for {path.log.model}: write one (docs/extending.md); "
            "--json prints the log line of each value"
        )
    known = remedies(path, engine)
    if known:
        return f"start the server with {known[0]}"
    if path.log.version is None or (path.attention is None and path.moe is None):
        return "give the log from the start of the server on: docker logs NAME 2>&1 | sm121 path -"
    words = ["sm121", "run", "--base-url", _address(path)]
    if source.container is not None:
        words += ["--container", source.container]
    elif source.file is not None:
        words += ["--server-log", str(source.file)]
    return shlex.join(words)


def _is_judged(model: str | None) -> bool:
    """Whether a model may be a shipped profile's model: its name matches, or is unknown."""
    if model is None:
        return True
    served = {profile.load(name).model.served_name for name in profile.shipped()}
    return any(served_model.is_named(model, name) for name in served)


def _address(path: KernelPath) -> str:
    port = requested.in_log(path, "port")
    if port is None or not port.isdecimal():
        return _URL
    return re.sub(r"\d+$", port, _URL)
