"""Which text token ids stand for, by the tokenizer.json of a checkpoint (byte-level BPE). Needs no
tokenizer library: to read ids is to put the bytes of their tokens one behind the other."""

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.core.model_folder import folder_of
from sm121.core.server import Server

FILE = "tokenizer.json"
#: What an engine shows for bytes that are no UTF-8; how many of it differs between decoders.
_REPLACED = "\ufffd"


def byte_alphabet() -> list[str]:
    """The printable character of each byte in a byte-level BPE file (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


_BYTES = {sign: bytes([byte]) for byte, sign in enumerate(byte_alphabet())}


@dataclass(frozen=True)
class Vocabulary:
    """The text of each token, as tokenizer.json spells it."""

    ordinary: Mapping[int, str]
    #: Tokens that are no text, as ``<|end|>``.
    special: Mapping[int, str]

    def differs(self, ids: Sequence[int], text: str, prompt: Sequence[int] = ()) -> str | None:
        """How a text differs from that of the ids; None where it is the same. Special tokens may be
        shown or left out; bytes that are no UTF-8 are shown in different ways; ids without a name
        have no text. `prompt`: behind one that ends within a sign, DecodeStream of Hugging Face's
        tokenizers, and so vLLM, sends the prompt's text too."""
        expected = [self._bytes(ids, special=special) for special in (False, True)]
        within_sign = self._bytes(prompt[-4:], special=True).decode("utf-8", "replace")[-1:]
        behind = within_sign == _REPLACED
        if any(_same(whole, text, behind=behind) for whole in expected):
            return None
        return f"the text {text!r} for ids that are {expected[0].decode('utf-8', 'replace')!r}"

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
    """The vocabulary of what a server serves; None where no tokenizer.json of it is at hand.
    `checkpoint`: its folder (default: that of a managed server's model)."""
    if checkpoint is None and (configuration := server.configuration) is not None:
        environment = {**os.environ, **dict(configuration.environment)}
        checkpoint = folder_of(configuration.model, environment)
    if checkpoint is None or not (checkpoint / FILE).is_file():
        return None
    return load(checkpoint / FILE)


@functools.lru_cache(maxsize=2)
def load(file: Path) -> Vocabulary | None:
    """Read a tokenizer.json; None where it is of another kind than byte-level BPE."""
    content = json.loads(file.read_text("utf-8"))
    if (content.get("decoder") or {}).get("type") != "ByteLevel":
        return None
    added = content.get("added_tokens") or []
    special = {token["id"]: token["content"] for token in added}
    ordinary = {token: text for text, token in content["model"]["vocab"].items()}
    return Vocabulary({k: v for k, v in ordinary.items() if k not in special}, special)


def _same(meant: bytes, text: str, *, behind: bool) -> bool:
    # The first bytes may end a sign that the prompt began: the engine knows it, the ids do not.
    whole = meant.lstrip(bytes(range(0x80, 0xC0)))
    expected, observed = _plain(whole.decode("utf-8", "replace")), _plain(text)
    behind = behind or len(whole) < len(meant)
    return observed == expected or (behind and observed.endswith(expected))


def _plain(text: str) -> str:
    return re.sub(f"{_REPLACED}+", _REPLACED, text).strip(_REPLACED)
