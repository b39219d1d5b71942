"""Keep secrets out of reports."""

import re
import shutil
import tempfile
import tomllib
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

REDACTED = "[redacted]"

#: How the names of variables and options with a secret value end.
_SECRET_NAME = re.compile(
    r"(?i)(?:^|[_-])(?:token|tokens_file|api_?key|key|secret|password|passwd|credentials?|cookie|auth)$"
)

_DATA: dict[str, Any] = tomllib.loads(
    (files("sm121.fixtures") / "redaction.toml").read_text("utf-8")
)


def _expanded(regex: str) -> str:
    """Replace ``<NAMED>`` and ``<NO_VALUE>`` by the regular expressions with these names."""
    for name in ("NAMED", "NO_VALUE"):
        regex = regex.replace(f"<{name}>", str(_DATA[name]))
    return regex


#: The patterns of secrets, with their replacements.
_PATTERNS = [(re.compile(_expanded(row["regex"])), row["shown"]) for row in _DATA["pattern"]]
#: Lower-case words. Any text that matches one of the patterns contains at least one of these words.
_WORDS = tuple(word.encode() for word in _DATA["WORDS"])
#: Matches the places in a lower-case text at which one of the patterns may match.
_SIGN = re.compile(_DATA["SIGN"].encode())
#: Values of variables are searched for only if they have at least this length. Shorter values, such
#: as 1 or true, occur in half of all lines.
_LEAST_OF_A_VARIABLE = 6
#: The number of bytes of a file that are read at once.
_CHUNK_BYTES = 1 << 20
#: Secrets shorter than this are replaced only as whole words, because they may also be parts of
#: many words.
_SHORT = 4
#: The marker that pytest inserts where it has truncated a text.
_CUT = "..."
#: Pieces of a secret beside a truncation are replaced if they have at least this many characters.
_LEAST_OF_A_PIECE = 6


def is_secret_name(name: str) -> bool:
    """Check whether a variable or option contains a secret, judged by its name (``HF_TOKEN``).

    Args:
        name: The name. The dashes of an option do not matter.
    """
    return _SECRET_NAME.search(name) is not None


def redact(text: str, secrets: Collection[str] = ()) -> str:
    """Replace the secrets in a text.

    Args:
        text: The text.
        secrets: Known secrets. Secrets are also found by their shape: tokens of Hugging Face,
            OpenAI, NVIDIA and GitHub, ``Authorization``, URLs with credentials, and assignments to
            secret names.
    """
    text = redact_known(text, secrets)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_known(text: str, secrets: Collection[str]) -> str:
    """Replace known secrets in a text, and pieces of them beside ``...``.

    pytest truncates long texts in the middle, so that a piece of a key is left on each side.

    Args:
        text: The text.
        secrets: The secrets. One with fewer than 4 characters is replaced only as a whole word.
    """
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        if len(secret) >= _SHORT:
            text = _without_pieces(text.replace(secret, REDACTED), secret)
        else:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", REDACTED, text)
    return text


def _without_pieces(text: str, secret: str) -> str:
    parts = text.split(_CUT)
    last = len(parts) - 1
    clean = []
    for index, part in enumerate(parts):
        start = _piece_at_start(part, secret) if index > 0 else 0
        # Reversed, so that the end of the part is checked like a beginning.
        end = _piece_at_start(part[::-1], secret[::-1]) if index < last else 0
        shown = part[start : len(part) - end]
        if start:
            shown = REDACTED + shown
        if end:
            shown += REDACTED
        clean.append(shown)
    return _CUT.join(clean)


def _piece_at_start(part: str, secret: str) -> int:
    """Return the length of the secret's piece at the start of a part; 0 if it is too short."""
    length = 0
    while length < len(part) and part[: length + 1] in secret:
        length += 1
    return length if length >= _LEAST_OF_A_PIECE else 0


def redact_environment(
    environment: Mapping[str, str], secrets: Collection[str] = ()
) -> dict[str, str]:
    """Replace the secrets in environment variables.

    Args:
        environment: The variables. If `is_secret_name` is true for a name, the whole value is
            replaced.
        secrets: Known secrets, which are replaced in all values.
    """
    all_secrets = {*secrets, *secrets_of(environment)}
    redacted = {}
    for name, value in environment.items():
        if is_secret_name(name) and value:
            redacted[name] = REDACTED
        else:
            redacted[name] = redact(value, all_secrets)
    return redacted


def redact_arguments(arguments: Sequence[str], secrets: Collection[str] = ()) -> list[str]:
    """Replace the secrets in the arguments of a command line.

    Args:
        arguments: The arguments. The whole value of options such as ``--api-key`` is replaced.
        secrets: Known secrets, which are replaced in all arguments.
    """
    result: list[str] = []
    value_is_secret = False
    for argument in arguments:
        if value_is_secret and not argument.startswith("--"):
            result.append(REDACTED)
            continue
        name, equals, _ = argument.partition("=")
        is_secret = argument.startswith("--") and is_secret_name(name)
        value_is_secret = is_secret and not equals
        if is_secret and equals:
            result.append(f"{name}={REDACTED}")
        else:
            result.append(redact(argument, secrets))
    return result


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Return the values of variables with secret names.

    Args:
        environment: The environment variables. Values of fewer than 6 characters are left out,
            because they also occur in texts that are not secret.
    """
    return {
        value
        for name, value in environment.items()
        if len(value) >= _LEAST_OF_A_VARIABLE and is_secret_name(name)
    }


def redact_file(file: Path, secrets: Collection[str] = ()) -> bool:
    """Replace the secrets in a complete file, in place.

    The file is read in pieces, and only rewritten from the first secret on.

    Args:
        file: The file.
        secrets: Known secrets.

    Returns:
        Whether the file contained a secret.

    Raises:
        OSError: The file cannot be read or written.
    """
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
    """Redact those lines of a piece that may contain a secret."""
    parts = []
    done = 0
    for position in sorted(_secret_positions(piece, secrets)):
        if position < done:
            continue  # this position is in a line that was already redacted
        begin = piece.rfind(b"\n", 0, position) + 1
        end = piece.find(b"\n", position) + 1 or len(piece)
        text = piece[begin:end].decode("utf-8", "surrogateescape")
        parts.append(piece[done:begin])
        parts.append(redact(text, secrets).encode("utf-8", "surrogateescape"))
        done = end
    parts.append(piece[done:])
    return b"".join(parts)


def _secret_positions(piece: bytes, secrets: Collection[str]) -> set[int]:
    """Return the positions in a piece of a file at which a secret may be."""
    positions: set[int] = set()
    small = piece.lower()
    # Searching for words is fast, and most logs contain none of them.
    if any(word in small for word in _WORDS):
        positions.update(match.start() for match in _SIGN.finditer(small))
    for secret in secrets:
        encoded = secret.encode(errors="replace")
        position = piece.find(encoded)
        while position >= 0:
            positions.add(position)
            position = piece.find(encoded, position + 1)
    return positions
