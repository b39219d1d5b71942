"""The Hugging Face tokenizer of gpt-oss (o200k_harmony), made offline from the vocabulary inside
oss-harmony.

oss-harmony embeds the tiktoken ranks but exports no file. Decoding every id gives the ranks back;
the merge list follows from the ranks as in transformers' TikTokenConverter
(convert_slow_tokenizer.py): every split of a token into two tokens is a merge, in the order of the
whole token's rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ORDINARY = 199_998
"""Ids below this are byte sequences; from here on they are special tokens."""

VOCABULARY = 201_088

# The split pattern of o200k_base (tiktoken, tiktoken_ext/openai_public.py).
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

# Enough of the gpt-oss template for engines that render chats from it; vLLM uses harmony instead.
_CHAT_TEMPLATE = """\
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {{ strftime_now("%Y-%m-%d") }}

Reasoning: {{ reasoning_effort | default("medium") }}

# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role in ("system", "developer") -%}
<|start|>developer<|message|># Instructions

{{ message.content }}<|end|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""


def ranks() -> list[bytes]:
    """The bytes of each ordinary token, by id (= rank). Raises ImportError without oss-harmony."""
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    # The public decode() replaces invalid UTF-8, and a token's bytes need not be valid.
    decode = encoding._inner.decode_bytes
    return [bytes(decode([token])) for token in range(ORDINARY)]


def special_tokens() -> dict[int, str]:
    """Id to text of every special token in the model's vocabulary, reserved ones included."""
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


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level BPE file (GPT-2's
    table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def merges(tokens: list[bytes]) -> list[tuple[int, int]]:
    """Every pair of tokens that makes a token, in the order in which byte-pair encoding prefers
    them."""
    rank = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[int, int]] = []
    for token in tokens:
        pairs = []
        for cut in range(1, len(token)):
            left, right = rank.get(token[:cut]), rank.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((left, right))
        found += sorted(pairs)
    return found


def write(directory: Path) -> None:
    """Write the files named in `FILES` into an existing directory; the same bytes every time.

    Raises ImportError without oss-harmony, ValueError when its vocabulary is not that of gpt-oss.
    """
    tokens = ranks()
    if len(set(tokens)) != ORDINARY:
        raise ValueError("the vocabulary of oss-harmony holds a token twice; this is not o200k")
    alphabet = byte_alphabet()
    texts = ["".join(alphabet[byte] for byte in token) for token in tokens]
    special = special_tokens()
    flags: dict[str, Any] = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": text, **flags} for token, text in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {text: token for token, text in enumerate(texts)},
            "merges": [[texts[left], texts[right]] for left, right in merges(tokens)],
        },
    }
    _write_json(directory / "tokenizer.json", tokenizer, indent=None)
    names = {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>",
    }
    config = {
        "added_tokens_decoder": {
            str(token): {"content": text, **flags} for token, text in special.items()
        },
        **names,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": {},
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131_072,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(directory / "tokenizer_config.json", config, indent=2)
    _write_json(directory / "special_tokens_map.json", names, indent=2)
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE, "utf-8")


def _write_json(path: Path, value: Any, indent: int | None) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent) + "\n", "utf-8")
