"""Keeps secrets out of what is written to a report."""

import functools
import re
import shutil
import tempfile
import tomllib
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    r"(?i)(?:^|[_-])(?:token|tokens_file|api_?key|key|secret|password|passwd|credentials?|cookie|auth)$"
)


_DATA: dict[str, Any] = tomllib.loads(
    (files("sm121.fixtures") / "redaction.toml").read_text("utf-8")
)
_EXPANDED = functools.partial(re.sub, "<(NAMED|NO_VALUE)>", lambda part: str(_DATA[part[1]]))
_PATTERNS = [(re.compile(_EXPANDED(each["regex"])), each["shown"]) for each in _DATA["pattern"]]
_WORDS = tuple(word.encode() for word in _DATA["WORDS"])
_SIGN = re.compile(_DATA["SIGN"].encode())
#: A shorter value of a variable, such as 1 or true, is in half of all lines.
_LEAST_OF_A_VARIABLE = 6
_CHUNK_BYTES = 1 << 20
_SHORT = 4  # a shorter secret is replaced as a whole word only, or it would eat half of the text


def is_secret_name(name: str) -> bool:
    """True for the name of a variable or option that holds a secret, such as ``HF_TOKEN``."""
    return _SECRET_NAME.search(name) is not None


def redact(text: str, secrets: Collection[str] = ()) -> str:
    """The text without the given secrets and what looks like one: tokens of Hugging Face, OpenAI,
    NVIDIA and GitHub, ``Authorization``, URLs with credentials, assignments to secret names."""
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
    all_secrets = {*secrets, *secrets_of(environment)}
    return {
        name: REDACTED if is_secret_name(name) and value else redact(value, all_secrets)
        for name, value in environment.items()
    }


def redact_arguments(arguments: Sequence[str], secrets: Collection[str] = ()) -> list[str]:
    """Command line arguments, the values of ``--api-key X`` and the like blanked."""
    result: list[str] = []
    value_is_secret = False
    for argument in arguments:
        if value_is_secret and not argument.startswith("--"):
            result.append(REDACTED)
            continue
        name, equals, _ = argument.partition("=")
        is_secret = argument.startswith("--") and is_secret_name(name)
        value_is_secret = is_secret and not equals
        hides = is_secret and equals
        result.append(f"{name}={REDACTED}" if hides else redact(argument, secrets))
    return result


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """The values that are secrets by the names of their variables, those too short left out."""
    return {
        value
        for name, value in environment.items()
        if len(value) >= _LEAST_OF_A_VARIABLE and is_secret_name(name)
    }


def redact_file(file: Path, secrets: Collection[str] = ()) -> bool:
    """Blank the secrets of a complete file, in its place; True if there were any. It is read in
    pieces, and written from the first secret on. Raises OSError: it cannot be read or written."""
    longest_first = tuple(sorted(filter(None, secrets), key=len, reverse=True))
    with file.open("r+b") as log, tempfile.TemporaryFile(dir=file.parent) as draft:
        first: int | None = None
        position = 0
        while piece := log.read(_CHUNK_BYTES) + log.readline():
            redacted = _redacted_piece(piece, longest_first)
            if first is None and redacted != piece:
                first = position
            if first is not None:
                draft.write(redacted)
            position += len(piece)
        if first is None:
            return False
        draft.seek(0)
        log.seek(first)
        shutil.copyfileobj(draft, log)
        log.truncate()
    return True


def _redacted_piece(piece: bytes, secrets: Collection[str]) -> bytes:
    small = piece.lower()
    # The commonest first: a log without any of them is through with this quickly.
    has_word = any(word in small for word in _WORDS)
    starts = {match.start() for match in _SIGN.finditer(small)} if has_word else set()
    for secret in secrets:
        encoded, position = secret.encode(errors="replace"), -1
        while (position := piece.find(encoded, position + 1)) >= 0:
            starts.add(position)
    parts, done = [], 0
    for position in sorted(starts):
        if position < done:
            continue  # in a line that was redacted as a whole
        begin = piece.rfind(b"\n", 0, position) + 1
        end = piece.find(b"\n", position) + 1 or len(piece)
        text = piece[begin:end].decode("utf-8", "surrogateescape")
        parts += [piece[done:begin], redact(text, secrets).encode("utf-8", "surrogateescape")]
        done = end
    return b"".join([*parts, piece[done:]])
