"""The resolved kernel path against the one that the profile requires."""

from __future__ import annotations

import re
from pathlib import Path

from sm121.core.profile import KernelPathRequirement, PathRule, PathValues
from sm121.evidence.kernel_path import KernelPath, mistaken_environment, search_last_start
from sm121.evidence.kernel_profile import KernelProfile, broken_rules

#: Values of a path that a profile may require. What no line shows contradicts the first three; of
#: the others it is said (`not_shown`).
MUST_BE_SHOWN = ("attention", "moe", "kv_layout")
COMPARED = (
    *MUST_BE_SHOWN,
    *("kv_cache_dtype", "dtype", "quantization", "speculative", "load_format", "cuda_graphs"),
    *("prefix_caching", "context", "requantised", "moe_variant"),
)


def _accepted(required: PathValues, name: str) -> tuple[str, ...] | None:
    """The accepted values of a field, as text; None: any. Of ``requantised`` each layer counts: a
    log shows some, and what it does not show is left to a profile of the kernels."""
    value = getattr(required, name, None)
    if value is None or isinstance(value, tuple):
        return value
    return (str(value),)


def not_shown(required: PathValues, path: KernelPath) -> list[str]:
    """The values that are required and that nothing has shown."""
    silent = [
        name
        for name in COMPARED
        if _accepted(required, name) is not None and getattr(path, name) is None
    ]
    layers = set(required.requantised or ()) - set(path.requantised or ())
    return silent + [f"requantised {name}" for name in sorted(layers) if path.requantised]


def contradictions(
    required: KernelPathRequirement, path: KernelPath, log: Path, configuration: str
) -> list[str]:
    """What of the path is not as required, a line each; empty when all of it is.

    Args:
        required: of the profile.
        path: what the log proves. A value of `MUST_BE_SHOWN` that it does not show contradicts a
            requirement on it.
        log: searched for the rules' signatures, line by line, from its last start on.
        configuration: name of the server configuration, which selects the rules.
    """
    found = []
    for name in COMPARED:
        accepted = _accepted(required, name)
        resolved = getattr(path, name)
        if accepted is None or (resolved is None and name not in MUST_BE_SHOWN):
            continue
        shown = resolved if isinstance(resolved, list) else [str(resolved)]
        if not set(shown) <= set(accepted):
            line = path.evidence.get(name, "no line of the log shows it")
            resolved = ", ".join(shown) if isinstance(resolved, list) else resolved
            found.append(f"{name}: required {' or '.join(accepted)}, seen {resolved} ({line})")
    for name, others in path.also.items():
        allowed = {*(_accepted(required, name) or ())}
        for value in others:
            if value not in allowed and f"{name}={value}" not in required.accepted_also:
                line = path.evidence.get(f"{name}_also", "no line")
                seen = getattr(path, name)
                found.append(f"{name}: required one value, seen {seen} and {value} ({line})")
    for rule in required.rules:
        if rule.where == "log" and rule.when.get("configuration") == configuration:
            found.extend(_violations(rule, log, path))
    if unknown := mistaken_environment(path):
        found.append(f"variables that the engine does not know: {', '.join(unknown)}")
    for name in path.fallbacks:
        if name not in required.accepted_fallbacks:
            found.append(f"fallback {name}: {path.evidence.get(f'fallbacks.{name}', 'no line')}")
    return found


def kernel_contradictions(
    required: KernelPathRequirement, path: KernelPath, seen: KernelProfile
) -> list[str]:
    """What of the kernels of a decode step is not as required, a line each.

    There must be kernels of attention and of the experts, whatever the profile says. Its rules for
    the MoE backend that the log resolved come on top; that no rule speaks of it is a contradiction
    where there are rules at all.
    """
    found = [
        f"a decode step must have kernels of {part}, seen none "
        f"(the longest are {', '.join(name[:60] for name in seen.names()[:5])})"
        for part in ("attention", "moe")
        if not any(kernel.part == part for kernel in seen.kernels)
    ]
    rules = [rule for rule in required.rules if rule.where == "profile"]
    if rules and path.moe is None:
        found.append("no evidence shows the MoE backend, so that its kernels cannot be judged")
    elif rules and path.moe is not None:
        chosen = [r for r in rules if re.fullmatch(r.when.get("moe", ""), path.moe, re.I)]
        if not chosen:
            known = ", ".join(rule.when["moe"] for rule in rules)
            found.append(f"the MoE backend {path.moe} has no rule on its kernels (rules: {known})")
        for rule in chosen:
            found.extend(broken_rules(seen, rule.must_see, rule.must_not_see))
    return found


def _violations(rule: PathRule, log: Path, path: KernelPath) -> list[str]:
    wanted = {pattern: re.compile(pattern) for pattern in rule.must_see}
    unwanted = [re.compile(pattern) for pattern in rule.must_not_see]
    found, seen = [], set()
    patterns = {*wanted.values(), *unwanted}
    for pattern, line in search_last_start(log, path.begins, patterns):
        seen.add(pattern)
        if pattern in unwanted:
            found.append(f"must not see {pattern.pattern!r}, seen: {line[:200]}")
    found.extend(
        f"must see {text!r}, no line of the log matches"
        for text, pattern in wanted.items()
        if pattern not in seen
    )
    return found
