"""The resolved kernel path against the one that the profile requires."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sm121.core.engine_settings import KernelPathRequirement, PathValues
from sm121.evidence.kernel_names import entry_of, load_names
from sm121.evidence.kernel_path import KernelPath, mistaken_environment, search_last_start
from sm121.evidence.kernel_profile import KernelProfile
from sm121.evidence.kernel_proof import with_kernels


@dataclass(frozen=True)
class Contradiction:
    """One thing of a server's path that is not as required.

    Two are the same if the part and what was seen of it are, whichever line of a log shows it.
    """

    #: A field of the path, a rule of the profile, or what a rank or a transport is compared by.
    part: str
    seen: str
    #: For people, with the evidence.
    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text


#: What a profile may require. Silence contradicts the first three; see `not_shown`.
MUST_BE_SHOWN = ("attention", "moe", "kv_layout")
COMPARED = (
    *MUST_BE_SHOWN,
    *("kv_cache_dtype", "dtype", "quantization", "speculative", "load_format", "cuda_graphs"),
    *("attention_decode", "prefix_caching", "context", "requantised", "moe_variant"),
)


def accepted_values(required: PathValues, name: str) -> tuple[str, ...] | None:
    """The accepted values of a field, as text; None: any. Of ``requantised`` each layer counts: a
    log shows some, and what it does not show is left to a profile of the kernels."""
    value = getattr(required, name, None)
    if value is None or isinstance(value, tuple):
        return value
    return (str(value),)


def not_shown(required: PathValues, path: KernelPath) -> list[str]:
    """The values that are required and that nothing has shown. ``auto`` is accepted in silence: a
    path has no value of it."""
    silent = [
        name
        for name in COMPARED
        if (accepted := accepted_values(required, name)) is not None
        and "auto" not in accepted
        and getattr(path, name) is None
    ]
    layers = set(required.requantised or ()) - set(path.requantised or ())
    return silent + [f"requantised {name}" for name in sorted(layers) if path.requantised]


def contradictions(
    required: KernelPathRequirement, path: KernelPath, log: Path, configuration: str
) -> list[Contradiction]:
    """What of the path that a log proves is not as required; so is a required value of
    `MUST_BE_SHOWN` that it does not show. The log is searched from its last start on."""
    findings: list[Contradiction] = []

    def add(part: str, seen: object, text: str) -> None:
        findings.append(Contradiction(part, str(seen), text))

    for name in COMPARED:
        accepted = accepted_values(required, name)
        resolved = getattr(path, name)
        if accepted is None or (resolved is None and name not in MUST_BE_SHOWN):
            continue
        resolved_values = resolved if isinstance(resolved, list) else [str(resolved)]
        if not set(resolved_values) <= set(accepted):
            line = path.evidence.get(name, "no line of the log shows it")
            resolved = ", ".join(resolved_values) if isinstance(resolved, list) else resolved
            required_values = " or ".join(accepted)
            add(name, resolved, f"{name}: required {required_values}, seen {resolved} ({line})")
    for name, others in path.also.items():
        allowed = {*(accepted_values(required, name) or ())}
        for value in others:
            if value not in allowed and f"{name}={value}" not in required.accepted_also:
                line = path.evidence.get(f"{name}_also", "no line")
                both = f"{getattr(path, name)} and {value}"
                add(name, both, f"{name}: required one value, seen {both} ({line})")
    for rule in required.rules:
        if rule.where != "log" or rule.when.get("configuration") != configuration:
            continue
        required_ones = {pattern: re.compile(pattern) for pattern in rule.must_see}
        unwanted = [re.compile(pattern) for pattern in rule.must_not_see]
        patterns, matched = {*required_ones.values(), *unwanted}, set()
        for pattern, line in search_last_start(log, path.begins, patterns, path.ends):
            matched.add(pattern)
            if pattern in unwanted:
                part = f"must not see {pattern.pattern!r}"
                add(part, line, f"{part}, seen: {line[:200]}")
        for text, required_one in required_ones.items():
            if required_one not in matched:
                part = f"must see {text!r}"
                add(part, "nothing", f"{part}, no line of the log matches")
    if unknown := ", ".join(mistaken_environment(path)):
        add("variables", unknown, f"variables that the engine does not know: {unknown}")
    for name in path.fallbacks:
        if name not in required.accepted_fallbacks:
            line = path.evidence.get(f"fallbacks.{name}", "no line")
            add("fallback", name, f"fallback {name}: {line}")
    return findings


def kernel_contradictions(
    required: KernelPathRequirement,
    path: KernelPath,
    seen: KernelProfile,
    layers: int | None = None,
) -> list[str]:
    """What of the kernels of a decode step (``seen``) is not as the log says or as required, a line
    each. There must be kernels of attention and of the experts, of the backends that the log
    resolved (``fixtures/kernels/names.toml``); a backend of which no kernel is known is
    contradicted, so that an emulation is no proof. The profile's rules come on top."""
    return [line for line, cut in _kernel_findings(required, path, seen, layers) if not cut]


def untold_of_kernels(
    required: KernelPathRequirement,
    path: KernelPath,
    seen: KernelProfile,
    layers: int | None = None,
) -> list[str]:
    """What of `kernel_contradictions` cannot be told from these kernels, a line each."""
    return [line for line, untold in _kernel_findings(required, path, seen, layers) if untold]


def backend_contradictions(path: KernelPath, seen: KernelProfile) -> list[str]:
    """Kernels that contradict the backends that the log resolved, whatever is required of them."""
    return [line for line, untold in _backend_findings(path, seen) if not untold]


def _kernel_findings(
    required: KernelPathRequirement, path: KernelPath, seen: KernelProfile, layers: int | None
) -> Iterator[tuple[str, bool]]:
    """Each line with whether it cannot be told: names are cut, or the calls prove nothing."""
    for part in ("attention", "moe"):
        if getattr(path, part) is None and part not in required.not_shown:
            yield (
                f"no evidence shows the {part} backend, so that its kernels cannot be judged",
                False,
            )
    yield from _backend_findings(path, seen)
    names, cut = seen.names(), seen.cut_names()
    for rule in required.rules:
        field, pattern = next(iter(rule.when.items()))
        if rule.where == "profile" and re.fullmatch(pattern, str(getattr(path, field, None)), re.I):
            for each in rule.must_see:
                if not any(re.search(each, name) for name in names):
                    observed = f"cannot be told, {len(cut)} names are cut" if cut else "seen none"
                    longest = ", ".join(name[:60] for name in names[:5])
                    line = f"must see a kernel {each!r}, {observed}; the longest are {longest}"
                    yield line, bool(cut)
            for each in rule.must_not_see:
                if wrong := [name for name in names if re.search(each, name)]:
                    yield f"must not see a kernel {each!r}, seen {wrong[0][:200]}", False
    proven = with_kernels(KernelPath(), seen, layers)
    for name in ("requantised", "moe_variant"):
        accepted, value = getattr(required, name), getattr(proven, name)
        if accepted is None:
            continue
        if value is None:
            yield f"{name}: required {', '.join(accepted)}, the kernels do not tell", True
        elif not (value in accepted if isinstance(value, str) else set(value) == set(accepted)):
            yield f"{name}: required {', '.join(accepted)}, seen {proven.evidence[name]}", False


def _backend_findings(path: KernelPath, seen: KernelProfile) -> Iterator[tuple[str, bool]]:
    longest = ", ".join(name[:60] for name in seen.names()[:5])
    cut = bool(seen.cut_names())
    drafts = path.speculative not in (None, "none")  # by a model with backends of its own
    for part in ("attention", "moe"):
        kernels = [kernel.name for kernel in seen.kernels if kernel.part == part]
        if not kernels:
            yield (
                f"a decode step must have kernels of {part}, seen none (the longest are {longest})",
                cut,
            )
        if (named := getattr(path, part)) is None:
            continue
        allowed = [named, *path.also.get(part, [])]
        listed = any(entry.part == part and entry.belongs_to(named) for entry in load_names().name)
        owned = [(name, entry) for name in kernels if (entry := entry_of(name)) and entry.backend]
        if not listed:
            yield f"no kernel of the {part} backend {named} is known", False
        elif not any(entry.belongs_to(named) for _, entry in owned):
            yield (
                f"{part}: the log says {named}, no kernel of it ran; the longest are {longest}",
                cut,
            )
        for entry, name in {entry: name for name, entry in reversed(owned)}.items():
            if not drafts and not any(entry.belongs_to(one) for one in allowed):
                yield (
                    f"{part}: the log says {named}, a kernel of {entry.id} ran: {name[:200]}",
                    False,
                )
