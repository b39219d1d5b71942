"""Decode token ids with the tokenizer.json of a checkpoint (byte-level BPE).

No tokenizer library is needed, because decoding only concatenates the bytes of the tokens.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.core.model_folder import folder_of
from sm121.core.server import Server

#: The name of the file in a checkpoint.
FILE = "tokenizer.json"
#: The character that engines send for invalid UTF-8. Decoders differ in how many of them they send.
_REPLACED = "\ufffd"


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in a byte-level BPE file (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    for number, byte in enumerate(unprintable):
        table[byte] = chr(256 + number)
    return [table[byte] for byte in range(256)]


_BYTES = {sign: bytes([byte]) for byte, sign in enumerate(byte_alphabet())}


@dataclass(frozen=True)
class Vocabulary:
    """The text of each token, as tokenizer.json spells it."""

    #: The tokens that represent text.
    ordinary: Mapping[int, str]
    #: The tokens that do not represent text, for example ``<|end|>``.
    special: Mapping[int, str]

    def differs(self, ids: Sequence[int], text: str, prompt: Sequence[int] = ()) -> str | None:
        """Compare a text that an engine sent with the text of token ids.

        The engine may send or omit special tokens, and may represent invalid UTF-8 in any way.
        Unknown ids count as empty texts.

        Args:
            ids: The token ids.
            text: The text that an engine sent.
            prompt: The token ids of the prompt. If the prompt ends in the middle of a character,
                vLLM may also send a part of the prompt's text (it uses DecodeStream of Hugging
                Face's tokenizers).

        Returns:
            A description of the difference; None if the texts agree.
        """
        expected = [self._bytes(ids, special=special) for special in (False, True)]
        last_sign = self._bytes(prompt[-4:], special=True).decode("utf-8", "replace")[-1:]
        behind = last_sign == _REPLACED
        if any(_same(whole, text, behind=behind) for whole in expected):
            return None
        return f"the text {text!r} for ids whose text is {expected[0].decode('utf-8', 'replace')!r}"

    def _bytes(self, ids: Sequence[int], *, special: bool) -> bytes:
        content = b""
        for token in ids:
            if token in self.ordinary:
                signs = self.ordinary[token]
                content += b"".join(_BYTES.get(sign) or sign.encode() for sign in signs)
            elif special:
                content += self.special.get(token, "").encode()
        return content


def of_server(server: Server, checkpoint: Path | None = None) -> Vocabulary | None:
    """Return the vocabulary of a server's model, or None if its tokenizer.json is not available.

    Args:
        server: The server.
        checkpoint: The folder of the server's checkpoint. If None, it is found by the configuration
            with which the suite started the server.
    """
    configuration = server.configuration
    if checkpoint is None and configuration is not None:
        checkpoint = folder_of(configuration.model, configuration.variables, configuration.revision)
    if checkpoint is None or not (checkpoint / FILE).is_file():
        return None
    return load(checkpoint / FILE)


@functools.lru_cache(maxsize=2)
def load(file: Path) -> Vocabulary | None:
    """Read a tokenizer.json.

    Args:
        file: The file.

    Returns:
        The vocabulary; None if the tokenizer is not byte-level BPE.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not JSON.
        KeyError: The file lacks the vocabulary of the model.
    """
    content = json.loads(file.read_text("utf-8"))
    if (content.get("decoder") or {}).get("type") != "ByteLevel":
        return None
    added = content.get("added_tokens") or []
    special = {token["id"]: token["content"] for token in added}
    ordinary = {}
    for text, token in content["model"]["vocab"].items():
        if token not in special:
            ordinary[token] = text
    return Vocabulary(ordinary, special)


def _same(content: bytes, text: str, *, behind: bool) -> bool:
    """Return whether the bytes of token ids are those of a text.

    Args:
        content: The bytes of the ids.
        text: The text that an engine sent.
        behind: Whether the text may begin with a part of the prompt's text.
    """
    # The first bytes may be the end of a character that began in the prompt.
    whole = content.lstrip(bytes(range(0x80, 0xC0)))
    expected = _plain(whole.decode("utf-8", "replace"))
    observed = _plain(text)
    if observed == expected:
        return True
    may_begin_before = behind or len(whole) < len(content)
    return may_begin_before and observed.endswith(expected)


def _plain(text: str) -> str:
    """Remove replacement characters, because decoders differ in their number."""
    return re.sub(f"{_REPLACED}+", _REPLACED, text).strip(_REPLACED)
