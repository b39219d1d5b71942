"""Check gpt-oss's harmony format: the structure of token ids, and remains of it in texts.

A well-formed answer is a sequence of messages::

    <|channel|> NAME <|message|> ... <|end|>
    <|start|> assistant <|channel|> NAME <|message|> ... <|return|> or <|call|>

Source: https://github.com/openai/harmony
"""

import re
from collections.abc import Sequence
from pathlib import Path

#: Ids of the special tokens in o200k_harmony.
RETURN = 200002
CONSTRAIN = 200003
CHANNEL = 200005
START = 200006
END = 200007
MESSAGE = 200008
CALL = 200012
#: The tokens that end a message.
ENDS = (END, RETURN, CALL)

#: Texts of the special tokens. Texts for users must not contain them.
SPECIAL_TEXTS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
    "<|startoftext|>",
    "<|endoftext|>",
)
#: Reserved special tokens, and the special token of o200k that is older than harmony.
_OTHER_SPECIAL = re.compile(r"<\|(?:reserved_\d+|endofprompt)\|>")
#: A header in a text from which the special tokens were removed.
_HEADER = re.compile(
    r"assistant(?:analysis|commentary|final)|\A(?:analysis|commentary|final)(?=[A-Z])"
)
#: Maximum number of tokens of a header.
_LONGEST_HEADER = 16
#: The exception of harmony's parser, as servers log it.
_ERROR = re.compile(r"\bHarmonyError\b")
#: Maximum number of violations that are returned for one answer.
_MOST = 4


def leaked(text: str | None) -> list[str]:
    """Return the special tokens that a text for users contains.

    Args:
        text: The text; None counts as empty.
    """
    text = text or ""
    named = [special for special in SPECIAL_TEXTS if special in text]
    return named + _OTHER_SPECIAL.findall(text)


def headers(text: str | None) -> list[str]:
    """Return remains of headers in a message: roles and channels without special tokens.

    Args:
        text: The text of the message; None counts as empty.
    """
    return _HEADER.findall(text or "")


def violations(ids: Sequence[int], *, finished: bool) -> list[str]:
    """Validate the format of generated tokens.

    Args:
        ids: The token ids of one answer.
        finished: Whether the answer ended by itself, and not at a limit.

    Returns:
        One line for each of the first four violations; empty if the answer is well-formed.
    """
    if not ids:
        return ["no token was generated"]
    errors = []
    if ids[0] != CHANNEL:
        errors.append(f"the first token is {ids[0]} in place of <|channel|> ({CHANNEL})")
    inside = False
    header = 0  # number of tokens since the header began
    messages = 0
    for index, token in enumerate(ids):
        if token == MESSAGE:
            if inside:
                errors.append(f"<|message|> at {index} inside a message")
            inside = True
            messages += 1
        elif token in ENDS:
            if not inside:
                errors.append(f"token {token} at {index} ends a message that was not begun")
            inside = False
            header = 0
            if token in (RETURN, CALL) and index != len(ids) - 1:
                errors.append(f"{len(ids) - 1 - index} tokens after the end at {index}")
        elif token in (START, CHANNEL, CONSTRAIN) and inside:
            errors.append(f"token {token} at {index} inside a message")
        elif not inside:
            header += 1
            if header > _LONGEST_HEADER:
                errors.append(f"no <|message|> within {_LONGEST_HEADER} tokens before {index}")
                break
    if finished and inside:
        errors.append("it ended inside a message")
    if not messages:
        errors.append("no message was begun")
    return errors[:_MOST]


def errors_in(log: Path) -> list[str]:
    """Return the lines of a server's log that report a failure of harmony's parser.

    Args:
        log: The log file.

    Returns:
        At most 200 characters of each line.
    """
    with log.open("r", encoding="utf-8", errors="replace") as lines:
        return [line.strip()[:200] for line in lines if _ERROR.search(line)]
