"""gpt-oss's channels, on the level of token ids: what a well-formed answer looks like. <|channel|>
NAME <|message|> ... <|end|> <|start|> assistant ... <|return|> or <|call|>."""

import re
from collections.abc import Sequence
from pathlib import Path

RETURN, CONSTRAIN, CHANNEL, START = 200002, 200003, 200005, 200006
END, MESSAGE, CALL = 200007, 200008, 200012
#: What ends a message.
ENDS = (END, RETURN, CALL)

#: A chat in this form, for /v1/completions: it ends by itself, with a special token.
PROMPT = "<|start|>user<|message|>What is the capital of France?<|end|><|start|>assistant"

#: Texts of the special tokens. None of them may be in what a user reads.
SPECIAL_TEXTS = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
    "<|startoftext|>", "<|endoftext|>",
)  # fmt: skip
#: Those that have no meaning yet, and the one that o200k had before harmony.
_OTHER_SPECIAL = re.compile(r"<\|(?:reserved_\d+|endofprompt)\|>")
#: What is left of a header when its special tokens are taken out of a text.
_HEADER = re.compile(
    r"assistant(?:analysis|commentary|final)|\A(?:analysis|commentary|final)(?=[A-Z])"
)
_LONGEST_HEADER = 16
_ERROR = re.compile(r"\bHarmonyError\b")


def leaked(text: str | None) -> list[str]:
    """The special tokens that stand in a text for users."""
    named = [special for special in SPECIAL_TEXTS if special in (text or "")]
    return named + _OTHER_SPECIAL.findall(text or "")


def headers(text: str | None) -> list[str]:
    """Names of roles and channels that stand in a message without their special tokens."""
    return _HEADER.findall(text or "")


def violations(ids: Sequence[int], *, finished: bool) -> list[str]:
    """What is not harmony in generated tokens. `finished`: it ended by itself, with its end."""
    if not ids:
        return ["no token was generated"]
    errors = []
    if ids[0] != CHANNEL:
        errors.append(f"the first token is {ids[0]} in place of <|channel|> ({CHANNEL})")
    inside, header, messages = False, 0, 0  # header: tokens since it was begun
    for index, token in enumerate(ids):
        if token == MESSAGE:
            if inside:
                errors.append(f"<|message|> at {index} inside a message")
            inside, messages = True, messages + 1
        elif token in ENDS:
            if not inside:
                errors.append(f"token {token} at {index} ends a message that was not begun")
            inside, header = False, 0
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
    return errors[:4]


def errors_in(log: Path) -> list[str]:
    """Lines of a server's log in which harmony's parser gave up."""
    with log.open("r", encoding="utf-8", errors="replace") as lines:
        return [line.strip()[:200] for line in lines if _ERROR.search(line)]
