"""What really ran at a visit to A or to B, against what it was asked for and what the other ran. A
measurement on another kernel path than was asked for counts neither way, and a comparison of a
thing with itself says nothing: the rules of every other measurement."""

from collections.abc import Sequence
from typing import Any

from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_settings import KernelPathRequirement
from sm121.core.server import Server
from sm121.engines import requested
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.requirement import COMPARED, contradictions
from sm121.regression.ab import Side, Visit

#: Of the kernel path: what makes two servers differ in what they compute, or how fast.
_EFFECTS = (
    "attention", "moe", "kv_layout", "cuda_graphs", "speculative", "native_fp4", "dtype",
    "kv_cache_dtype", "load_format", "quantization", "prefix_caching", "block_size", "version",
)  # fmt: skip


def effects(path: KernelPath) -> dict[str, Any]:
    """The values of a path that two starts of one configuration have in common."""
    return {name: getattr(path, name) for name in _EFFECTS}


def not_as_asked(
    required: KernelPathRequirement,
    server: Server,
    path: KernelPath,
    configuration: ServerConfiguration | None,
    under_test: str,
) -> list[str]:
    """What of a visit is not what it was to be, a line each: what the profile requires, but for the
    values that the side asks for. ``configuration``: without the side's; None: a URL."""
    wrong = list(path.differences)
    if server.log is None:
        return wrong
    fields: set[str | None] = set()
    if configuration is not None:
        others = {report.by for report in requested.compare(configuration, path)}
        fields = {report.field for report in path.requested if report.by not in others}
    if fields:  # the side's word replaces the profile's; the rules on lines are about its values
        silent = {name: None for name in COMPARED if name in fields}
        required = required.model_copy(update=silent).model_copy(update={"rules": ()})
    return wrong + contradictions(required, path, server.log, under_test)


def moved(visit: Visit, earlier: Sequence[Visit]) -> list[str]:
    """What a visit ran otherwise than the first one of its side, a line each."""
    first = next((each for each in earlier if each.side == visit.side and each.path), None)
    if first is None:
        return []
    return [  # what one log shows and another does not, as a build that is cached, is no move
        f"{name} is {visit.path[name]}, at its first visit it was {value}"
        for name, value in first.path.items()
        if None not in (value, visit.path.get(name)) and visit.path[name] != value
    ]


def the_same(
    sides: tuple[Side, Side], engine: str, a: Visit, b: Visit
) -> tuple[str | None, str | None]:
    """Why a comparison of two configurations is one of a thing with itself, and what of their
    difference nothing shows; None and None where neither is so."""
    first, second = sides
    if first.text == second.text:
        return None, None  # asked for: how far starts of one thing differ
    rules = requested.load_requests(engine).request
    of_a, of_b = _requested(first), _requested(second)
    changed = {n for n in {*of_a, *of_b} if of_a.get(n) != of_b.get(n)}
    # A table in JSON is there by its inner names, too.
    changed = {n for n in changed if not any(other.startswith(f"{n}.") for other in changed)}
    fields: dict[str, str] = {}
    for rule in rules:
        if rule.field == "cuda_graphs":  # eager mode turns compilation off, too, and none shows it
            continue
        for name in filter(None, (rule.argument, rule.variable, *rule.aliases)):
            fields[_normal(name)] = rule.field
    unknown = {name for name in changed if name not in fields}
    if first.python != second.python:
        unknown.add("--engine-python")
    moved = {fields[name] for name in changed if name in fields}
    observed = {f for f in moved if a.path.get(f) is not None or b.path.get(f) is not None}
    differing = {f for f in observed if a.path.get(f) != b.path.get(f)}
    if not unknown and not differing and observed == moved:
        values = ", ".join(f"{name} {a.path.get(name)}" for name in sorted(moved))
        return (
            f"B ran what A ran ({values or 'the same options'}): of a comparison with itself "
            f"nothing follows for {second.text!r} against {first.text!r}",
            None,
        )
    silent = sorted(unknown | {name for name in changed if fields.get(name) in moved - observed})
    if differing or not silent or "--engine-python" in unknown:
        return None, None
    return None, f"A/B: nothing shows that {', '.join(silent)} made B another server than A"


def _requested(side: Side) -> dict[str, str]:
    words = requested.read_arguments(side.arguments)
    return {**words, **{_normal(name): value for name, value in side.environment}}


def _normal(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
