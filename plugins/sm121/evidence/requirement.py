"""The resolved kernel path against the one that the profile requires."""

from __future__ import annotations

import re
from pathlib import Path

from sm121.core.profile import KernelPathRequirement, PathRule
from sm121.evidence.kernel_path import KernelPath, mistaken_environment, search_last_start
from sm121.evidence.kernel_profile import KernelProfile, broken_rules


def contradictions(
    required: KernelPathRequirement, path: KernelPath, log: Path, configuration: str
) -> list[str]:
    """What of the path is not as required, a line each; empty when all of it is.

    Args:
        required: of the profile.
        path: what the log proves; a value that it does not show contradicts a requirement on it.
        log: searched for the rules' signatures, line by line, from its last start on.
        configuration: name of the server configuration, which selects the rules.
    """
    found = []
    for name in ("attention", "moe", "kv_layout"):
        accepted = getattr(required, name)
        seen = getattr(path, name)
        if accepted is not None and seen not in accepted:
            line = path.evidence.get(name, "no line of the log shows it")
            found.append(f"{name}: required {' or '.join(accepted)}, seen {seen} ({line})")
    for name, others in path.also.items():
        allowed = {*(getattr(required, name, None) or ())}
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
    for pattern, line in search_last_start(log, path.begins, patterns, path.ends):
        seen.add(pattern)
        if pattern in unwanted:
            found.append(f"must not see {pattern.pattern!r}, seen: {line[:200]}")
    found.extend(
        f"must see {text!r}, no line of the log matches"
        for text, pattern in wanted.items()
        if pattern not in seen
    )
    return found
