"""Keeps secrets out of what is written to a report."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    r"(?i)(?:^|[_-])(?:token|tokens_file|api_?key|key|secret|password|passwd|credentials?|cookie|auth)$"
)
_PATTERNS = (
    # scheme://user:password@host, and a bare token in the place of the user
    (re.compile(r"(?<=://)[^/\s@'\"]+@"), f"{REDACTED}@"),
    (
        re.compile(
            r"(?i)\b(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)\s+)[^\s'\",]+"
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"\b([Bb]earer\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\1{REDACTED}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), REDACTED),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"), REDACTED),
    (re.compile(r"\b(?:nvapi-|ghp_|gho_|github_pat_|glpat-)[A-Za-z0-9_-]{16,}"), REDACTED),
    # NAME=value and 'name': 'value', for names that end in a secret's word (max_tokens does not)
    (
        re.compile(
            r"(?i)\b((?:\w+[_-])?(?:token|api_?key|secret|password|passwd)['\"]?\s*[=:]\s*\[?['\"]?)"
            r"(?!none\b|null\b|true\b|false\b|\[redacted\])[^\s'\",\])}]{3,}"
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(--api-key[= ])(?!\[redacted\])\S+"), rf"\1{REDACTED}"),
)
_SHORT = 4  # a shorter secret is replaced as a whole word only, or it would eat half of the text


def is_secret_name(name: str) -> bool:
    """True for the name of a variable or option that holds a secret, such as ``HF_TOKEN``."""
    return _SECRET_NAME.search(name) is not None


def redact(text: str, secrets: Collection[str] = ()) -> str:
    """The text without the given secrets and without what looks like one.

    Covers Hugging Face, OpenAI-like, NVIDIA and GitHub tokens, ``Authorization`` headers, URLs with
    credentials, and assignments to names that end in token, key, secret or password.
    """
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        if len(secret) >= _SHORT:
            text = text.replace(secret, REDACTED)
        else:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", REDACTED, text)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_environment(
    environment: Mapping[str, str], secrets: Collection[str] = ()
) -> dict[str, str]:
    """The variables, those with a secret's name blanked and the others searched for secrets."""
    known = {*secrets, *secrets_of(environment)}
    return {
        name: REDACTED if is_secret_name(name) and value else redact(value, known)
        for name, value in environment.items()
    }


def redact_arguments(arguments: Sequence[str], secrets: Collection[str] = ()) -> list[str]:
    """Command line arguments, the values of ``--api-key X`` and the like blanked."""
    result: list[str] = []
    value_is_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_option = argument.startswith("--")
        if value_is_secret and not is_option:
            result.append(REDACTED)
            continue
        value_is_secret = is_option and not equals and is_secret_name(name)
        if is_option and equals and is_secret_name(name):
            result.append(f"{name}={REDACTED}")
        else:
            result.append(redact(argument, secrets))
    return result


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """The values that are secrets by the names of their variables."""
    return {value for name, value in environment.items() if value and is_secret_name(name)}
