"""Keeps secrets out of what is written to a report."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    r"(?i)(?:^|[_-])(?:token|tokens_file|api_?key|key|secret|password|passwd|credentials?|cookie|auth)$"
)
_NAMED = (
    r"(?:\w+[_-])?(?:token|api[_-]?key|access[_-]?key|secret|password|passwd|credentials?)['\"]?"
)
_NO_VALUE = r"(?!(?:none|None|null|true|True|false|False|redacted)\b|\[redacted\])"
_PATTERNS = (
    # scheme://user:password@host, and a bare token in the place of the user; @ in a password too
    (re.compile(r"(?<=://)[^/\s'\"]+@"), f"{REDACTED}@"),
    (
        re.compile(
            r"(?i)\b(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)\s+)[^\s'\",]+"
        ),
        rf"\1{REDACTED}",
    ),
    # Any other scheme, or none: the whole value.
    (
        re.compile(
            r"(?i)\b(authorization['\"]?\s*[:=]\s*['\"]?)"
            r"(?!(?:(?:bearer|basic|token)\s+)?\[redacted\])[^'\"\n,}\s][^'\"\n,}]*"
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"\b([Bb]earer\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\1{REDACTED}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), REDACTED),
    (re.compile(r"\bapi_org_[A-Za-z0-9]{16,}"), REDACTED),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"), REDACTED),
    (re.compile(r"\b(?:nvapi-|ghp_|gho_|github_pat_|glpat-)[A-Za-z0-9_-]{16,}"), REDACTED),
    # NAME=value and 'name': 'value', for names that end in a secret's word (max_tokens does not)
    (re.compile(rf"(?i)\b({_NAMED}\s*[=:]\s*)\[['\"][^\]]*\]"), rf"\1{REDACTED}"),
    (
        re.compile(rf"(?i)\b({_NAMED}\s*[=:]\s*\[?['\"]?){_NO_VALUE}[^\s'\",\])}}]{{3,}}"),
        rf"\1{REDACTED}",
    ),
    # Variables: OPENAI_KEY, but not key or cache_key, which name no secret.
    (
        re.compile(
            rf"\b([A-Z][A-Z0-9_]*_(?:KEY|AUTH|COOKIE)['\"]?\s*[=:]\s*['\"]?){_NO_VALUE}"
            r"[^\s'\",\])}]{3,}"
        ),
        rf"\1{REDACTED}",
    ),
    # --api-key x, and the same as a list of arguments
    (
        re.compile(
            rf"(--(?:[a-z]+-)*(?:api-key|token|secret|password)(?:[= ]|['\"],\s*)['\"]?)"
            rf"{_NO_VALUE}(?!-)[^\s'\",\])]+"
        ),
        rf"\1{REDACTED}",
    ),
)
#: A shorter value of a variable, such as 1 or true, is in half of all lines.
_LEAST_OF_A_VARIABLE = 6
_CHUNK_BYTES = 1 << 20
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
    """The values that are secrets by the names of their variables, those left out that are too
    short to be one."""
    return {
        value
        for name, value in environment.items()
        if len(value) >= _LEAST_OF_A_VARIABLE and is_secret_name(name)
    }


def redact_file(file: Path, secrets: Collection[str] = ()) -> bool:
    """Blank the secrets of a file that is complete; True if there were any.

    It stays the same file to whoever has it open or linked. It is read in pieces, and only what
    comes after the first secret is written again.

    Raises:
        OSError: it cannot be read or written.
    """
    known = tuple(sorted(filter(None, secrets), key=len, reverse=True))
    with file.open("r+b") as log, tempfile.TemporaryFile(dir=file.parent) as draft:
        first: int | None = None
        position = 0
        while piece := log.read(_CHUNK_BYTES) + log.readline():
            shown = _redacted_piece(piece, known)
            if first is None and shown != piece:
                first = position
            if first is not None:
                draft.write(shown)
            position += len(piece)
        if first is None:
            return False
        draft.seek(0)
        log.seek(first)
        shutil.copyfileobj(draft, log)
        log.truncate()
    return True


#: In small letters, a part of everything that a pattern finds: a log is searched once for it, and
#: only the lines that have it are looked at again.
_WORDS = (
    *(b"token", b"key", b"://", b"auth", b"secret", b"passw", b"hf_", b"sk-", b"earer", b"api"),
    *(b"gh", b"glpat", b"credential", b"cookie"),
)
_SIGN = re.compile(
    rb"://[^/\s'\"]+@|authorization|bearer\s|hf_[a-z0-9]{16}|api_org_|sk-[a-z0-9_-]{16}|nvapi-|gh[po]_"
    rb"|github_pat_|glpat-|--[a-z-]*(?:api-key|token|secret|password)[ ='\"]"
    rb"|(?:token|key|secret|password|passwd|credentials?|_auth|cookie)['\"]?\s*[=:]"
)


def _redacted_piece(piece: bytes, secrets: Collection[str]) -> bytes:
    """Whole lines, those with a secret in them redacted."""
    small = piece.lower()
    # The commonest first: a log without any of them is through with this quickly.
    known = any(word in small for word in _WORDS)
    found = {match.start() for match in _SIGN.finditer(small)} if known else set()
    for secret in secrets:
        wanted, place = secret.encode(errors="replace"), -1
        while (place := piece.find(wanted, place + 1)) >= 0:
            found.add(place)
    shown, done = [], 0
    for place in sorted(found):
        if place < done:
            continue  # in a line that was redacted as a whole
        begin = piece.rfind(b"\n", 0, place) + 1
        end = piece.find(b"\n", place) + 1 or len(piece)
        text = piece[begin:end].decode("utf-8", "surrogateescape")
        shown += [
            piece[done:begin],
            redact(text, secrets).encode("utf-8", "surrogateescape"),
        ]
        done = end
    return b"".join([*shown, piece[done:]])
