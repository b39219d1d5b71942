"""Checks of the servers of an A/B run: the configuration of each, and whether A and B differ."""

from collections.abc import Sequence
from typing import NamedTuple

from sm121.core import engine_arguments
from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_arguments import normal_name
from sm121.core.engine_settings import KernelPathRequirement
from sm121.core.server import Server
from sm121.core.verdict import Invalid
from sm121.engines import request_rules, requested
from sm121.evidence.kernel_path import KernelPath
from sm121.evidence.requirement import COMPARED, contradictions
from sm121.measure.measurement import Measurement
from sm121.regression.ab import Side, Visit

#: Fields of the kernel path that change the results of a server or its speed.
EFFECTS = (
    "attention",
    "moe",
    "kv_layout",
    "cuda_graphs",
    "speculative",
    "native_fp4",
    "dtype",
    "kv_cache_dtype",
    "load_format",
    "quantization",
    "prefix_caching",
    "block_size",
    "version",
)
_PYTHON = "--engine-python"


class SideComparison(NamedTuple):
    """Whether two configurations result in two different servers.

    Attributes:
        void: The reason if both sides ran the same server; None if they did not.
        unproven: The options whose effect no log shows, if the logs show no other difference
            between the sides; else None.
    """

    void: str | None
    unproven: str | None


def require_valid(side: str, measurement: Measurement) -> None:
    """Require that the samples of a measurement are valid.

    Args:
        side: The side of the measured server.
        measurement: The measurement.

    Raises:
        Invalid: They are not.
    """
    if measurement.valid:
        return
    why = "; ".join(str(item) for item in measurement.invalid)
    remedy = ""
    if measurement.unsteady:
        remedy = ". End other programs on this machine, and run again"
    raise Invalid(f"{side}: {measurement.name}: {why}{remedy}")


def path_deviations(
    required: KernelPathRequirement,
    server: Server,
    path: KernelPath,
    configuration: ServerConfiguration | None,
    under_test: str,
) -> list[str]:
    """Return the deviations of a measured server from its side's configuration.

    Args:
        required: The kernel path that the profile requires. It is not checked in the fields that
            the side itself requests.
        server: The measured server.
        path: The kernel path that the server's log shows.
        configuration: The configuration under test without the side's arguments; None for a URL.
        under_test: The name of the configuration under test.

    Returns:
        One line per deviation.
    """
    deviations = list(path.differences)
    if server.log is None:
        return deviations
    fields: set[str | None] = set()
    if configuration is not None:
        under_test_requests = {report.by for report in requested.compare(configuration, path)}
        fields = {report.field for report in path.requested if report.by not in under_test_requests}
    # If the side changes a value, the profile's rules on log lines do not apply: they require the
    # profile's values.
    if fields:
        replaced = {name: None for name in COMPARED if name in fields}
        required = required.model_copy(update=replaced).model_copy(update={"rules": ()})
    for contradiction in contradictions(required, path, server.log, under_test):
        deviations.append(str(contradiction))
    return deviations


def changes_since_first(visit: Visit, earlier: Sequence[Visit]) -> list[str]:
    """Return how a measured server's kernel path differs from that of its side's first server.

    A field that only one of the logs shows, for example after a cached build, is no change.

    Args:
        visit: The measurement of the server.
        earlier: The earlier measurements of both sides.

    Returns:
        One line per field.
    """
    first = None
    for candidate in earlier:
        if candidate.side == visit.side and candidate.path:
            first = candidate
            break
    if first is None:
        return []
    lines = []
    for name, before in first.path.items():
        now = visit.path.get(name)
        if before is not None and now is not None and now != before:
            lines.append(f"{name} is {now}, at the first turn of this side it was {before}")
    return lines


def compare_sides(sides: tuple[Side, Side], engine: str, a: Visit, b: Visit) -> SideComparison:
    """Check that the options in which two configurations differ changed the kernel path.

    Args:
        sides: Both sides. They may be identical, to measure how much starts of one configuration
            differ.
        engine: The name of the engine.
        a: A measurement of A.
        b: A measurement of B.
    """
    first, second = sides
    if first.text == second.text:
        return SideComparison(None, None)
    changed = _changed_options(first, second)
    fields = _fields_of_options(engine)
    # The options that no field of the kernel path shows.
    unknown = changed - fields.keys()
    if first.python != second.python:
        unknown.add(_PYTHON)
    requested_fields = {fields[name] for name in changed & fields.keys()}
    observed = set()
    differing = set()
    for name in requested_fields:
        of_a = a.path.get(name)
        of_b = b.path.get(name)
        if of_a is not None or of_b is not None:
            observed.add(name)
        if of_a != of_b:
            differing.add(name)
    if not unknown and not differing and observed == requested_fields:
        values = [f"{name} {a.path.get(name)}" for name in sorted(requested_fields)]
        void = (
            f"B ran the same configuration as A ({', '.join(values) or 'the same options'}), so "
            f"comparing {second.text!r} with {first.text!r} would compare a server with itself"
        )
        return SideComparison(void, None)
    unobserved = requested_fields - observed
    silent = sorted(unknown | {name for name in changed if fields.get(name) in unobserved})
    if differing or not silent or _PYTHON in unknown:
        return SideComparison(None, None)
    unproven = f"A/B: nothing shows that {', '.join(silent)} made B different from A"
    return SideComparison(None, unproven)


def _changed_options(first: Side, second: Side) -> set[str]:
    """Return the options and variables in which two sides differ, by their normal names.

    An option whose value is a JSON table is omitted: the names in the table replace it.
    """
    of_a = _options_of(first)
    of_b = _options_of(second)
    changed = {name for name in {*of_a, *of_b} if of_a.get(name) != of_b.get(name)}
    return {name for name in changed if not any(other.startswith(f"{name}.") for other in changed)}


def _options_of(side: Side) -> dict[str, str]:
    options = dict(engine_arguments.parse_options(side.arguments))
    for name, value in side.environment:
        options[normal_name(name)] = value
    return options


def _fields_of_options(engine: str) -> dict[str, str]:
    """Return the field of the kernel path that each option of an engine requests."""
    fields: dict[str, str] = {}
    for rule in request_rules.load_requests(engine).request:
        if rule.field == "cuda_graphs":  # eager mode also disables compilation; no field shows it
            continue
        for name in (rule.argument, rule.variable, *rule.aliases):
            if name:
                fields[normal_name(name)] = rule.field
    return fields
