"""Build the Hugging Face tokenizer of gpt-oss (o200k_harmony) without a download.

oss-harmony contains the tiktoken ranks, but does not export them as a file, so this module decodes
each id. It derives the list of merges from the ranks as transformers' TikTokenConverter does
(convert_slow_tokenizer.py): each split of a token into two tokens is a merge, and merges are
ordered by the rank of the whole token.

The other parts of the tokenizer are in ``fixtures/canary/checkpoint``: the split pattern of
o200k_base (tiktoken, tiktoken_ext/openai_public.py), and a part of gpt-oss's chat template for
engines that render chats with it. vLLM uses harmony instead.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from sm121.core.vocabulary import byte_alphabet

#: The number of ordinary tokens. Ids below it are byte sequences; all others are special tokens.
ORDINARY = 199_998
#: The number of ids, including special tokens.
VOCABULARY = 201_088
#: The files of a tokenizer.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def ranks() -> list[bytes]:
    """Return the bytes of each ordinary token, indexed by its id, which is also its rank.

    Raises:
        ImportError: oss-harmony is not installed.
    """
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    # The public decode() replaces invalid UTF-8, but the bytes of a token may be invalid.
    decode = encoding._inner.decode_bytes
    return [bytes(decode([token])) for token in range(ORDINARY)]


def special_tokens() -> dict[int, str]:
    """Return the texts of all special tokens in the model's vocabulary, by id.

    Raises:
        ImportError: oss-harmony is not installed.
        ValueError: oss-harmony lacks the special token for an id.
    """
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    tokens = {}
    for text in encoding.special_tokens_set:
        token = encoding.encode(text, allowed_special="all")[0]
        if token < VOCABULARY:
            tokens[token] = text
    missing = set(range(ORDINARY, VOCABULARY)) - tokens.keys()
    if missing:
        raise ValueError(f"oss-harmony names no special token for id {min(missing)}")
    return dict(sorted(tokens.items()))


def merges(tokens: list[bytes]) -> list[tuple[int, int]]:
    """Return all pairs of tokens whose concatenation is a token, in the order of the merges.

    Args:
        tokens: The bytes of each token, by rank.

    Returns:
        The ids of each pair.
    """
    rank = {token: index for index, token in enumerate(tokens)}
    pairs_in_order: list[tuple[int, int]] = []
    for token in tokens:
        pairs = []
        for cut in range(1, len(token)):
            head = rank.get(token[:cut])
            tail = rank.get(token[cut:])
            if head is not None and tail is not None:
                pairs.append((head, tail))
        pairs_in_order += sorted(pairs)
    return pairs_in_order


def write(directory: Path) -> None:
    """Write the files in `FILES`, always with the same bytes.

    Args:
        directory: An existing directory.

    Raises:
        ImportError: oss-harmony is not installed.
        ValueError: oss-harmony has another vocabulary.
    """
    tokens = ranks()
    if len(set(tokens)) != ORDINARY:
        raise ValueError("the vocabulary of oss-harmony contains a token twice; this is not o200k")
    alphabet = byte_alphabet()
    texts = ["".join(alphabet[byte] for byte in token) for token in tokens]
    special = special_tokens()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    flags["special"] = True
    data = resources.files("sm121.fixtures") / "canary" / "checkpoint"
    tokenizer = json.loads((data / "tokenizer.json").read_text("utf-8"))
    tokenizer["added_tokens"] = [
        {"id": token, "content": text, **flags} for token, text in special.items()
    ]
    tokenizer["model"]["vocab"] = {text: token for token, text in enumerate(texts)}
    tokenizer["model"]["merges"] = [[texts[head], texts[tail]] for head, tail in merges(tokens)]
    _write_json(directory / "tokenizer.json", tokenizer, indent=None)
    config = json.loads((data / "tokenizer_config.json").read_text("utf-8"))
    config["added_tokens_decoder"] = {
        str(token): {"content": text, **flags} for token, text in special.items()
    }
    _write_json(directory / "tokenizer_config.json", config, indent=2)
    for name in ("special_tokens_map.json", "chat_template.jinja"):
        (directory / name).write_bytes((data / name).read_bytes())


def _write_json(path: Path, value: Any, indent: int | None) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent) + "\n", "utf-8")
