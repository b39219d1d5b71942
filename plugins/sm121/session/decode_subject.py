"""The subject of `sm121 profile`: what was profiled, and the limits that apply to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sm121.core.engine_arguments import parse_options
from sm121.core.errors import Sm121Error
from sm121.core.profile import Profile
from sm121.engines import request_rules
from sm121.evidence.decode_time import Limits
from sm121.evidence.kernel_path import KernelPath
from sm121.machine import roofline

#: The variable that sets the layout of vLLM's KV cache.
LAYOUT = "VLLM_KV_CACHE_LAYOUT"


@dataclass
class Subject:
    """The thing that was profiled.

    Attributes:
        name: The server, the configuration or the file.
        prompt: Tokens of the prompt; None: not known.
        backends: The requested backends of the experts; empty: not known.
        any_release: The configuration of the backends, if the release is unknown and each backend
            that it requires of a release or a build is accepted; else empty.
        no_backend: The reason why the requested backend of a configuration is not known.
        speculative: The drafters that the configuration requires; empty: not known.
        layers: The layers of the model, each of which has experts; None: not known.
        model: The model of the profile.
        layout: The KV layout that the log shows; None: not known.
        limits: The time limits of a token and of the experts.
        bound_ms: The shortest time of a token that the memory allows; None: not known.
        moe_bound_ms: The shortest time of the experts of one layer that the memory allows; None:
            not known.
        bound_formats: The formats of the bound if the subject's own are not known; else empty.
        no_bound: The reason why there is no bound.
        faults: The faults that are not about kernels.
    """

    name: str
    prompt: int | None
    limits: Limits
    backends: Sequence[str] = ()
    any_release: str = ""
    no_backend: str = ""
    speculative: Sequence[str] = ()
    layers: int | None = None
    model: str = ""
    layout: str | None = None
    bound_ms: float | None = None
    moe_bound_ms: float | None = None
    bound_formats: str = ""
    no_bound: str = ""
    faults: list[str] = field(default_factory=list)


def require_backends(subject: Subject, backends: Sequence[str], configuration: str) -> None:
    """Set the requested backends of the experts, or the reason why they are not known.

    Args:
        subject: The subject, whose fields are set.
        backends: The requested backends; empty: not known.
        configuration: The name of the configuration, for the reason.
    """
    subject.backends = backends
    if not backends and subject.limits.moe_ms is not None:
        subject.no_backend = (
            f"MoE: expected a backend in configuration {configuration} whose kernels are known, "
            "got none. Give --backend NAME"
        )


def require_model(subject: Subject, profile: Profile, arguments: Sequence[str]) -> None:
    """Set the number of layers with experts, by which a trace of another model is recognised.

    The number is not known for a model without experts or with experts in some layers alone, and
    for a pipeline, each rank of which has a part of the layers.

    Args:
        subject: The subject, whose fields are set.
        profile: The profile, for its model and its engine.
        arguments: The arguments of the configuration.
    """
    config = roofline.read_config(profile.model.id)
    has_experts = config is not None and "num_local_experts" in config
    given = parse_options((*profile.engine.arguments, *arguments))
    ranks = given.get("pipeline_parallel_size", "1")
    if config is None or not has_experts or profile.model.reads is not None or ranks != "1":
        return
    subject.layers = int(config["num_hidden_layers"])
    subject.model = profile.model.id


def require_layout(subject: Subject, requested: str | None, shown: str | None, engine: str) -> None:
    """Set the KV layout of the log, and add a fault if it is not the requested one.

    Args:
        subject: The subject, whose fields are set.
        requested: The requested layout; None: any.
        shown: The layout that the log shows; None: it shows none.
        engine: The engine, whose rules list the names of layouts.
    """
    subject.layout = shown
    if requested is not None and not is_layout(requested, shown, engine):
        subject.faults.append(f"KV layout: expected {requested}, the log shows {shown or 'none'}")


def is_layout(requested: str, shown: str | None, engine: str) -> bool:
    """Return whether a log shows the requested KV layout, whose name depends on the release.

    Args:
        requested: The value of the variable that requests it.
        shown: The layout that the log shows.
        engine: The engine, whose rules list the names.
    """
    if shown is None:
        return False
    rules = request_rules.load_requests(engine).request
    patterns = [rule.pattern(requested) for rule in rules if rule.variable == LAYOUT]
    return shown == requested or any(each.fullmatch(shown) for each in patterns if each)


def add_bound(
    subject: Subject,
    chosen: Profile,
    configuration: str,
    model: str,
    *,
    arguments: Sequence[str] = (),
    path: KernelPath | None = None,
) -> None:
    """Set the shortest time in which the memory bandwidth allows the server to compute a token.

    Args:
        subject: The subject, whose fields are set.
        chosen: The profile.
        configuration: The name of the configuration.
        model: The model's folder, or its hub id.
        arguments: More arguments of the server.
        path: The kernel path of the server; None: not known.
    """
    config = roofline.read_config(model)
    healthy = None if chosen.box is None else chosen.box.healthy_gb_s
    if config is None or healthy is None:
        subject.no_bound = "the profile names no bandwidth of a healthy machine"
        return
    try:
        read = roofline.cost(chosen, configuration, subject.prompt or 0, config, arguments, path)
    except Sm121Error as error:
        subject.no_bound = str(error)
        return
    if read is None:
        subject.no_bound = "the formats of its layers are unknown, or it uses speculative decoding"
        return
    _set_bound(subject, read, healthy.high, config)


def add_least_bound(subject: Subject, chosen: Profile) -> None:
    """Add the lowest possible time of a token for the profile's model.

    The formats of a running server are only in its log, and a file contains no formats. The bound
    therefore uses the stored weights if the profile has their bytes. Otherwise it assumes that all
    weights are MXFP4, because no server of the model reads fewer bytes.

    Args:
        subject: The subject, whose fields are set.
        chosen: The profile.
    """
    config = roofline.read_config(chosen.model.id)
    healthy = None if chosen.box is None else chosen.box.healthy_gb_s
    if config is None or healthy is None:
        subject.no_bound = (
            f"profile {chosen.name} has no bandwidth of a healthy machine (--profile names another)"
        )
        return
    depth = subject.prompt or 0
    try:
        if chosen.model.reads is not None:
            least = roofline.stored(chosen.model.reads.weights, config, depth)
            subject.bound_formats = f"{chosen.model.id} as stored"
        else:
            least = roofline.traffic(config, depth=depth, formats=roofline.SMALLEST)
            subject.bound_formats = f"{chosen.model.id} with all weights in MXFP4"
    except Sm121Error as error:
        subject.no_bound = str(error)
        return
    _set_bound(subject, roofline.spread(least, chosen.nodes, config), healthy.high, config)


def _set_bound(
    subject: Subject, read: roofline.Traffic, gb_s: float, config: Mapping[str, Any]
) -> None:
    """Compute both bounds from the bytes of a token and the bandwidth in GB/s."""
    subject.bound_ms = 1e3 / roofline.Ceiling(read, gb_s, 1.0).tok_s
    if read.experts:
        layers = int(config["num_hidden_layers"])
        subject.moe_bound_ms = read.experts / (gb_s * 1e9) / layers * 1e3
