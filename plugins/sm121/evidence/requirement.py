"""Compare the kernel path that a log proves with the path that the profile requires.

`sm121.evidence.kernel_requirement` does the same for the kernels in a profiler's trace.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sm121.core.engine_settings import KernelPathRequirement, PathRule, PathValues
from sm121.evidence.kernel_path import KernelPath, mistaken_environment, search_last_start

#: The maximum length of a log line in a contradiction, in characters.
_LONGEST_LINE = 200


@dataclass(frozen=True)
class Contradiction:
    """A difference between a server's path and the required one.

    Two contradictions are equal if they have the same part and the same value, even with different
    evidence.
    """

    #: What differs: a field of the path, a rule of the profile, or a property of a rank or of its
    #: transport.
    part: str
    #: The observed value.
    value: str
    #: A description with the evidence.
    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text


#: The fields that a log must show if they are required. See also `not_shown`.
MUST_BE_SHOWN = ("attention", "moe", "kv_layout")
#: The fields that a profile may require.
COMPARED = (
    *MUST_BE_SHOWN,
    "kv_cache_dtype",
    "dtype",
    "quantization",
    "speculative",
    "load_format",
    "cuda_graphs",
    "attention_decode",
    "prefix_caching",
    "context",
    "requantised",
    "moe_variant",
)


def accepted_values(required: PathValues, name: str) -> tuple[str, ...] | None:
    """Return the accepted values of a field, as text.

    Args:
        required: The required path.
        name: The field. For ``requantised``, each layer is a value, because the log may show only
            some of the layers, and a profile of the kernels decides about the others.

    Returns:
        The values; None if any value is accepted.
    """
    value = getattr(required, name, None)
    if value is None or isinstance(value, tuple):
        return value
    return (str(value),)


def not_shown(required: PathValues, path: KernelPath) -> list[str]:
    """Return the required fields for which there is no evidence.

    Args:
        required: The required path. Fields that accept ``auto`` are left out, because a path never
            has this value.
        path: The path that the evidence proves.

    Returns:
        The fields. If only some of the required layers of ``requantised`` are proven, the result
        has the other layers.
    """
    silent: list[str] = []
    for name in COMPARED:
        accepted = accepted_values(required, name)
        if accepted is not None and "auto" not in accepted and getattr(path, name) is None:
            silent.append(name)
    if path.requantised:
        layers = set(required.requantised or ()) - set(path.requantised)
        silent += [f"requantised {name}" for name in sorted(layers)]
    return silent


def contradictions(
    required: KernelPathRequirement, path: KernelPath, log: Path, configuration: str
) -> list[Contradiction]:
    """Compare a path with the required one.

    Args:
        required: The required path.
        path: The path that the log proves.
        log: The log. The profile's rules are applied to the lines of its last start.
        configuration: The name of the configuration, which selects the rules.

    Returns:
        The contradictions, including required fields of `MUST_BE_SHOWN` that the log does not show.

    Raises:
        OSError: The log cannot be read.
    """
    return [
        *_wrong_values(required, path),
        *_wrong_others(required, path),
        *_broken_rules(required, path, log, configuration),
        *_unknown_variables(path),
        *_unaccepted_fallbacks(required, path),
    ]


def _wrong_values(required: KernelPathRequirement, path: KernelPath) -> Iterator[Contradiction]:
    for name in COMPARED:
        accepted = accepted_values(required, name)
        resolved = getattr(path, name)
        if accepted is None or (resolved is None and name not in MUST_BE_SHOWN):
            continue
        values = resolved if isinstance(resolved, list) else [str(resolved)]
        if not set(values) <= set(accepted):
            line = path.evidence.get(name, "no line of the log shows it")
            found = ", ".join(values)
            text = f"{name}: expected {' or '.join(accepted)}, got {found} ({line})"
            yield Contradiction(name, found, text)


def _wrong_others(required: KernelPathRequirement, path: KernelPath) -> Iterator[Contradiction]:
    """Yield a contradiction for each additional value (``also``) that is not accepted."""
    for name, others in path.also.items():
        accepted = accepted_values(required, name) or ()
        for value in others:
            if value in accepted or f"{name}={value}" in required.accepted_also:
                continue
            line = path.evidence.get(f"{name}_also", "no line")
            both = f"{getattr(path, name)} and {value}"
            yield Contradiction(name, both, f"{name}: expected one value, got {both} ({line})")


def _broken_rules(
    required: KernelPathRequirement, path: KernelPath, log: Path, configuration: str
) -> Iterator[Contradiction]:
    for rule in required.rules:
        if rule.where == "log" and rule.when.get("configuration") == configuration:
            yield from _search_log(rule, path, log)


def _search_log(rule: PathRule, path: KernelPath, log: Path) -> Iterator[Contradiction]:
    wanted = [re.compile(pattern) for pattern in rule.must_see]
    unwanted = [re.compile(pattern) for pattern in rule.must_not_see]
    matched: set[re.Pattern[str]] = set()
    for pattern, line in search_last_start(
        log, path.log.begins, {*wanted, *unwanted}, path.log.ends
    ):
        matched.add(pattern)
        if pattern in unwanted:
            part = f"expected no line {pattern.pattern!r}"
            shown = line[:_LONGEST_LINE]
            text = f"a line {pattern.pattern!r} that must not be there: {shown}"
            yield Contradiction(part, line, text)
    for pattern in dict.fromkeys(wanted):
        if pattern not in matched:
            part = f"expected a line {pattern.pattern!r}"
            yield Contradiction(part, "nothing", f"no line {pattern.pattern!r}")


def _unknown_variables(path: KernelPath) -> Iterator[Contradiction]:
    unknown = ", ".join(mistaken_environment(path))
    if unknown:
        text = f"variables that the engine does not know: {unknown}"
        yield Contradiction("variables", unknown, text)


def _unaccepted_fallbacks(
    required: KernelPathRequirement, path: KernelPath
) -> Iterator[Contradiction]:
    for name in path.fallbacks:
        if name not in required.accepted_fallbacks:
            line = path.evidence.get(f"fallbacks.{name}", "no line")
            yield Contradiction("fallback", name, f"fallback {name}: {line}")
