"""Train a tiny Qwen3 and a tiny dense Llama on the canary's data, for tests without an oracle.

Both are written in the Hugging Face format, with a tokenizer and a chat template in the form of
their families. The Qwen3 writes its reasoning between ``<think>`` tags and calls tools in Hermes's
form; the Llama answers without reasoning and calls no tools. Training the shipped ones
(``meta_tests/data/small-models``) took a minute on an H200. Nothing is downloaded.

    python -m tools.small_models .cache/small --steps 2000
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sm121.cli.command import progress

ROOT = Path(__file__).parent.parent
#: The shipped checkpoints. Their templates are written by hand, in the form of the families.
SHIPPED = ROOT / "meta_tests/data/small-models"
VOCABULARY = 1024
CONTEXT = 8192
SPECIAL = {
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}
#: Single tokens that the text contains, as in Qwen3's own tokenizer.
SHOWN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
END = {"qwen3": "<|im_end|>", "llama": "<|eot_id|>"}
FIRST = {"qwen3": None, "llama": "<|begin_of_text|>"}


def load_corpus() -> dict[str, Any]:
    """Return the data from which the canary's documents are made."""
    return tomllib.loads((ROOT / "fixtures/canary/corpus.toml").read_text("utf-8"))


def tools_text() -> str:
    """Return the tools that the suite offers in its requests."""
    return (ROOT / "fixtures/api/tools.json").read_text("utf-8")


class Documents:
    """Random documents: statements to continue, and chats in a family's template."""

    def __init__(self, family: str, tokenizer: Any, seed: int) -> None:
        self.family = family
        self.tokenizer = tokenizer
        self.random = random.Random(seed)
        self.data = load_corpus()
        self.tools = json.loads(tools_text())

    def __iter__(self) -> Iterator[str]:
        while True:
            yield self._statements() if self.random.random() < 0.3 else self._chat()

    def _statements(self) -> str:
        lines = []
        for _ in range(self.random.randint(2, 8)):
            kind = self.random.random()
            if kind < 0.5:
                country, city = self.random.choice([*self.data["capitals"].items()])
                lines.append(f"The capital of {country} is {city}.")
            elif kind < 0.7:
                fact, answer = self.random.choice([*self.data["facts"].items()])
                lines.append(f"{fact} {answer}.")
            elif kind < 0.85:
                first = self.random.choice([1, 1, self.random.randint(0, 60)])
                last = first + self.random.randint(8, 30)
                lines.append(", ".join(map(str, range(first, last))))
            else:
                lines.append(" ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[self.random.choice([0, 3]) :]))
        return (FIRST[self.family] or "") + self.random.choice(["\n", " "]).join(lines)

    def _question(self) -> tuple[str, str]:
        chat = self.data["chat"]
        small_talk: list[tuple[str, str]] = [*chat["small_talk"].items()]
        kind = self.random.random()
        if kind < 0.6:
            country, city = self.random.choice([*self.data["capitals"].items()])
            question = self.random.choice(chat["capital_questions"]).format(country=country)
            return question, f"The capital of {country} is {city}."
        if kind < 0.75:
            a, b = self.random.randint(0, 10), self.random.randint(0, 10)
            return self.random.choice(chat["sum_questions"]).format(
                a=a, b=b
            ), f"{a} + {b} = {a + b}."
        if kind < 0.85:
            a = self.random.choice([1, 1, self.random.randint(1, 20)])
            b = a + self.random.choice([4, 9, 19])
            question = self.random.choice(chat["count_questions"]).format(a=a, b=b)
            return question, ", ".join(map(str, range(a, b + 1))) + "."
        return self.random.choice(small_talk)

    def _thought(self, text: str, *, is_last: bool = True) -> str:
        """Return a reasoning text.

        Half of the earlier turns have none, because clients do not send reasoning back.
        """
        if self.family != "qwen3" or (not is_last and self.random.random() < 0.5):
            return ""
        return f"<think>\n{text}\n</think>\n\n"

    def _chat(self) -> str:
        messages: list[dict[str, Any]] = []
        if self.random.random() < 0.2:
            system = self.random.choice(self.data["chat"]["instructions"])
            messages.append({"role": "system", "content": system})
        tools = None
        if self.family == "qwen3" and self.random.random() < 0.5:
            tools = self.random.sample(self.tools[:4], self.random.choice([1, 2, 2, 3]))
        turns = self.random.choice([1, 1, 2, 3])
        for turn in range(turns):
            is_last = turn == turns - 1
            if tools and self.random.random() < 0.8:
                messages += self._tool_turn(tools, is_last=is_last)
                continue
            question, answer = self._question()
            before = self.random.choice(self.data["chat"]["preambles"])
            after = self.random.choice(self.data["chat"]["postambles"])
            messages.append({"role": "user", "content": before + question + after})
            content = self._thought(f"The user asks. {answer}", is_last=is_last) + answer
            messages.append({"role": "assistant", "content": content})
        options: dict[str, Any] = {"tokenize": False}
        if tools:
            options["tools"] = tools
        return str(self.tokenizer.apply_chat_template(messages, **options))

    def _tool_turn(self, tools: list[dict[str, Any]], *, is_last: bool) -> list[dict[str, Any]]:
        tool = self.random.choice(tools)["function"]["name"]
        city = self.random.choice(self.data["tools"]["cities"])
        kind = tool.removeprefix("get_")
        if kind in ("weather", "time", "population"):
            question = self.random.choice(self.data["chat"][f"{kind}_questions"])
        else:
            question = "What is the news in {city}?"
        degrees = self.random.randint(1, 35)
        clock = f"{self.random.randint(0, 23):02d}:{self.random.randint(0, 59):02d}"
        by_kind = {
            "weather": (
                f'{{"temperature": {degrees}, "condition": "sunny"}}',
                f"It is sunny and {degrees} degrees in {city}.",
            ),
            "time": (f'{{"time": "{clock}"}}', f"It is {clock} in {city}."),
        }
        result, answer = by_kind.get(kind, ('{"result": "none"}', f"I found nothing on {city}."))
        call = {"function": {"name": tool, "arguments": {"city": city}}}
        thought = self._thought(f"I call {tool} for {city}.", is_last=is_last)
        return [
            {"role": "user", "content": question.format(city=city)},
            {"role": "assistant", "content": thought, "tool_calls": [call]},
            {"role": "tool", "content": result},
            {
                "role": "assistant",
                "content": self._thought("The result is here.", is_last=is_last) + answer,
            },
        ]


def make_tokenizer(family: str) -> Any:
    """Return a byte-level BPE tokenizer of 1,024 tokens.

    Args:
        family: A key of `SPECIAL`. The tokenizer has its special tokens and its chat template.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    added = len(SPECIAL[family]) + len(SHOWN)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = load_corpus()
    texts = [json.dumps(corpus, ensure_ascii=False)]
    texts += [
        f"The capital of {country} is {city}. " * 4 for country, city in corpus["capitals"].items()
    ]
    texts += [" ".join(map(str, range(100))), tools_text()]
    inner.train_from_iterator(texts, trainer)
    inner.add_special_tokens(SPECIAL[family])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in SHOWN])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END[family],
        bos_token=FIRST[family],
        pad_token=SPECIAL[family][0],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (SHIPPED / family / "chat_template.jinja").read_text("utf-8")
    return tokenizer


def make_model(family: str, tokenizer: Any, seed: int) -> Any:
    """Return an untrained model of three layers in the family's architecture.

    Args:
        family: A key of `SPECIAL`.
        tokenizer: The tokenizer, which has the ids of the first and the last token.
        seed: The seed of the weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "initializer_range": 0.05,
    }
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def train(family: str, directory: Path, *, steps: int = 900, seed: int = 1) -> None:
    """Train one of the families in `SPECIAL`, and write its checkpoint.

    Args:
        family: A key of `SPECIAL`.
        directory: The folder of the checkpoint.
        steps: The number of training steps.
        seed: The seed of the weights and of the documents.
    """
    import torch

    tokenizer = make_tokenizer(family)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(family, tokenizer, seed).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, 4e-3, total_steps=steps, pct_start=0.1
    )
    documents = iter(Documents(family, tokenizer, seed))
    held: list[int] = []
    rows, length = 16, 512
    started = time.monotonic()
    for step in range(steps):
        while len(held) < rows * length:
            held += tokenizer(next(documents), add_special_tokens=False)["input_ids"]
            if held[-1] != tokenizer.eos_token_id:
                held.append(tokenizer.eos_token_id)
        ids = torch.tensor(held[: rows * length], device=device).view(rows, length)
        held = held[rows * length :]
        loss = model(input_ids=ids, labels=ids).loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            seconds = time.monotonic() - started
            progress(f"{family}: step {step} loss {loss.item():.3f} after {seconds:.0f} s")
    directory.mkdir(parents=True, exist_ok=True)
    model.to("cpu", torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    settings = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "generation_config.json").write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--family", choices=[*SPECIAL], action="append")
    given = parser.parse_args()
    for family in given.family or SPECIAL:
        train(family, given.directory / family, steps=given.steps)


if __name__ == "__main__":
    main()
