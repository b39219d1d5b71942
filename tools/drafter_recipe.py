"""How the canary's Eagle3 drafter was taught: the model for training, the loop, what is shipped.

`python -m tools.drafter_recipe OUT.safetensors` (30 minutes on one core) makes
fixtures/canary/drafter.safetensors and its manifest again; `sm121.checkpoint.drafter` expands them
to a checkpoint. EAGLE-3 (Li et al. 2025): a layer of Llama's make reads three hidden states of the
target and the next token, and guesses the token after it; its own output stands in for the
target's hidden states from the second guess on, in training as in use ("training-time test").
It learns the canary's distribution, not the corpus's tokens: what is accepted is what the canary
would say.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tools import canary_recipe
from tools.canary_recipe import Batch, Corpus, Encoder, Student, load_corpus, make_batch, round_bf16

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 256, 4, 2, 64, 384
LAYER_IDS = (2, 3, 4)
"""Hidden states after the second, third and fourth layer of the canary, as vLLM counts them."""
THETA, EPS = 10_000.0, 1e-5
GUESSES = 3
"""Guesses of one draft that training unrolls."""

Progress = Callable[[str], None]


def rotary(length: int) -> tuple[Tensor, Tensor]:
    """cos, sin [length, 32] of the plain rotary embedding (Su et al. 2021), halves apart."""
    frequency = THETA ** -(torch.arange(HEAD_DIM // 2, dtype=torch.float64) / (HEAD_DIM // 2))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angles.cos().float(), angles.sin().float()


class Drafter(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """The layer of `vllm/model_executor/models/llama_eagle3.py` on the compact vocabulary."""

    def __init__(self, known: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int, std: float) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(rows, columns, generator=generator) * std)

        width, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        self.weights = torch.nn.ParameterDict(
            {
                "fc": normal(HIDDEN, 3 * HIDDEN, (3 * HIDDEN) ** -0.5),
                "input_layernorm": torch.nn.Parameter(torch.ones(HIDDEN)),
                "hidden_norm": torch.nn.Parameter(torch.ones(HIDDEN)),
                "post_attention_layernorm": torch.nn.Parameter(torch.ones(HIDDEN)),
                "norm": torch.nn.Parameter(torch.ones(HIDDEN)),
                "q_proj": normal(width, 2 * HIDDEN, (2 * HIDDEN) ** -0.5),
                "k_proj": normal(kv, 2 * HIDDEN, (2 * HIDDEN) ** -0.5),
                "v_proj": normal(kv, 2 * HIDDEN, (2 * HIDDEN) ** -0.5),
                "o_proj": normal(HIDDEN, width, 0.5 * width**-0.5),
                "gate_proj": normal(INTERMEDIATE, HIDDEN, HIDDEN**-0.5),
                "up_proj": normal(INTERMEDIATE, HIDDEN, HIDDEN**-0.5),
                "down_proj": normal(HIDDEN, INTERMEDIATE, 0.5 * INTERMEDIATE**-0.5),
                "lm_head": normal(known, HIDDEN, HIDDEN**-0.5),
            }
        )
        self.cos, self.sin = rotary(canary_recipe.LONG_ROW)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        return x * scale * round_bf16(self.weights[name])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x.bfloat16(), self.weights[name].bfloat16()).float()

    def _heads(self, x: Tensor, name: str) -> Tensor:
        rows, length, _ = x.shape
        return self._linear(x, name).view(rows, length, -1, HEAD_DIM).transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        cos, sin = self.cos[:length], self.sin[:length]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def combine(self, states: Tensor) -> Tensor:
        """[B, T, 3 * hidden] hidden states of the target to what a guess begins with."""
        return self._linear(states, "fc")

    def guess(
        self, hidden: Tensor, embedded: Tensor, mask: Tensor, earlier: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """One guess at every place: logits [B, T, known] and the hidden state that the next takes.

        Place u of guess g attends to the first guess up to u - g, and to one place of each guess
        between: what its KV cache holds in use. `earlier` has their keys and values, and is added
        to.
        """
        normed = torch.cat(
            (self._norm(embedded, "input_layernorm"), self._norm(hidden, "hidden_norm")), -1
        )
        q = self._rotate(self._heads(normed, "q_proj")) * HEAD_DIM**-0.5
        k, v = self._rotate(self._heads(normed, "k_proj")), self._heads(normed, "v_proj")
        group = HEADS // KV_HEADS
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        earlier.append((k, v))
        number = len(earlier) - 1
        length = q.shape[-2]
        first_k, first_v = earlier[0]
        at = torch.arange(length)
        reach = (at[None, :] > at[:, None] - number) if number else at[None, :] > at[:, None]
        scores = (q.bfloat16() @ first_k.bfloat16().transpose(-1, -2)).float()
        scores = (scores + mask).masked_fill(reach, -1e9)
        apart, values = [], []
        for guess in range(1, number + 1):
            # The place of that guess which this one sees: as far back as guesses lie between.
            back = number - guess
            keys = earlier[guess][0].roll(back, -2)
            values.append(earlier[guess][1].roll(back, -2))
            apart.append((q * keys).sum(-1, keepdim=True))
        shares = torch.cat((scores, *apart), -1).softmax(-1)
        heads = (shares[..., :length].bfloat16() @ first_v.bfloat16()).float()
        for place, value in enumerate(values):
            heads = heads + shares[..., length + place, None] * value
        rows = q.shape[0]
        x = hidden + self._linear(heads.transpose(1, 2).reshape(rows, length, -1), "o_proj")
        h = self._norm(x, "post_attention_layernorm")
        inner = functional.silu(self._linear(h, "gate_proj")) * self._linear(h, "up_proj")
        x = x + self._linear(inner, "down_proj")
        return self._linear(self._norm(x, "norm"), "lm_head"), x


def watch(student: Student, batch: Batch) -> tuple[Tensor, Tensor]:
    """The canary on a batch: its logits [B, T, known + 1] and hidden states [B, T, 3 * hidden]."""
    x = functional.embedding(batch.ids, round_bf16(student.weights["embed_tokens"]))
    noise = (torch.randint(0, 2, x.shape) * 2 - 1) * canary_recipe.EMBEDDING_NOISE
    x = torch.where((batch.ids == student.known)[..., None], x + noise, x)
    states = []
    for n in range(canary_recipe.LAYERS):
        x = x + student._attention(n, x, batch.full if n % 2 else batch.sliding)
        x = x + student._experts(n, x)[0]
        if n + 1 in LAYER_IDS:
            states.append(x)
    logits = functional.linear(
        student._norm(x, "norm").bfloat16(), student.weights["lm_head"].bfloat16()
    ).float()
    logits[..., -1] += math.log(canary_recipe.VOCABULARY - student.known)
    return logits, torch.cat(states, -1)


def lessons(
    drafter: Drafter, student: Student, batch: Batch, guesses: int = GUESSES
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each guess: its logits, the canary's at the same place, and the weight of the place."""
    with torch.no_grad():
        target, states = watch(student, batch)
        embedded = functional.embedding(batch.targets, round_bf16(student.weights["embed_tokens"]))
        noise = (torch.randint(0, 2, embedded.shape) * 2 - 1) * canary_recipe.EMBEDDING_NOISE
        embedded = torch.where(
            (batch.targets == student.known)[..., None], embedded + noise, embedded
        )
        # Place u reads token u + 1 and guesses u + 2: what the canary says at u + 1.
        target = target.roll(-1, 1)
        weights = batch.weights.roll(-1, 1)
        # The document ends with the token that is read, or nothing known is to be guessed.
        weights = weights * (batch.weights > 0) * (target.argmax(-1) != student.known)
        weights[:, -1] = 0
    hidden = drafter.combine(states)
    earlier: list[tuple[Tensor, Tensor]] = []
    result = []
    for number in range(guesses):
        logits, out = drafter.guess(hidden, embedded, batch.full.float(), earlier)
        usable = weights.clone()
        for back in range(1, number + 1):  # the guesses before it were of the same document
            usable *= (batch.weights.roll(back, 1) > 0).float()
        usable[:, :number] = 0
        result.append((logits, target, usable))
        hidden = out.roll(1, 1)
    return result


def evaluate(
    drafter: Drafter, student: Student, encoder: Encoder, data: dict[str, Any]
) -> list[float]:
    """Acceptance by position on fresh documents, greedy, where the canary answers: the share of
    the first guesses that are right, of the first two that are both, and so on."""
    corpus = Corpus(data, seed=987_654)
    right = [0.0] * GUESSES
    count = 0.0
    with torch.no_grad():
        for n in range(6):
            batch = make_batch(corpus, encoder, 8, canary_recipe.LONG_ROW if n % 3 == 2 else 256)
            told = lessons(drafter, student, batch)
            hits = [
                (logits.argmax(-1) == target[..., :-1].argmax(-1)) & (weights > 0)
                for logits, target, weights in told
            ]
            # A draft begins at u; its guess g stands at u + g.
            judged = (told[0][2] >= 1).float()
            for g in range(1, GUESSES):
                judged *= (told[g][2].roll(-g, 1) >= 1).float()
            chain = judged.bool()
            count += judged.sum().item()
            for g in range(GUESSES):
                chain = chain & hits[g].roll(-g, 1)
                right[g] += chain.sum().item()
    return [round(hit / count, 4) for hit in right]


def save(drafter: Drafter, encoder: Encoder, out_file: Path) -> None:
    """Write what is shipped: the weights as BF16 bits, and the ids of the compact vocabulary."""
    from safetensors.numpy import save_file

    tensors: dict[str, np.ndarray[Any, Any]] = {
        name: weight.detach().bfloat16().view(torch.uint16).numpy()
        for name, weight in drafter.weights.items()
    }
    save_file({**tensors, "tokens": np.array(encoder.tokens, dtype=np.uint32)}, out_file)
    out_file.chmod(0o644)


def train(
    out_file: Path, *, steps: int, seed: int = 3, rate: float = 3e-3, progress: Progress = print
) -> dict[str, Any]:
    """Train the drafter and write `out_file` (safetensors) and its manifest beside it (.json)."""
    from importlib.resources import files

    from safetensors.numpy import load

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    shipped = (files("sm121.fixtures") / "canary" / "weights.safetensors").read_bytes()
    tensors = load(shipped)
    encoder = Encoder(tensors["tokens"].tolist())
    student = Student(len(encoder.tokens), 0).eval()
    canary_recipe.take_up(student, tensors)
    for parameter in student.parameters():
        parameter.requires_grad_(False)
    data = load_corpus()
    corpus = Corpus(data, seed)
    drafter = Drafter(len(encoder.tokens), seed)
    with torch.no_grad():  # the canary's own output matrix is where a guess may begin
        drafter.weights["lm_head"].copy_(student.weights["lm_head"][:-1])
    optimiser = torch.optim.AdamW(
        drafter.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.02, fused=True
    )
    started, average = time.monotonic(), 0.0
    for step in range(steps):
        factor = min(1.0, (step + 1) / 60) * (
            0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
        )
        for group in optimiser.param_groups:
            group["lr"] = rate * factor
        batch = make_batch(corpus, encoder, *((4, 512) if step % 6 == 5 else (8, 256)))
        loss = torch.zeros(())
        for logits, target, weights in lessons(drafter, student, batch):
            kept = weights > 0
            wanted = target[kept][:, :-1].softmax(-1)
            surprise = functional.cross_entropy(logits[kept], wanted, reduction="none")
            loss = loss + (surprise * weights[kept]).sum() / weights[kept].sum() / GUESSES
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimiser.step()
        average = loss.item() if step == 0 else 0.97 * average + 0.03 * loss.item()
        if step % 25 == 0 or step == steps - 1:
            progress(f"step {step} loss {average:.4f} after {time.monotonic() - started:.0f} s")
        if step and step % 200 == 0:
            save(drafter, encoder, out_file)
            progress(f"accepted by position {evaluate(drafter, student, encoder, data)}")
    save(drafter, encoder, out_file)
    manifest = {
        "format": 1,
        "sha256": hashlib.sha256(out_file.read_bytes()).hexdigest(),
        "canary_sha256": hashlib.sha256(shipped).hexdigest(),
        "recipe": {
            "steps": steps,
            "seed": seed,
            "rate": rate,
            "guesses": GUESSES,
            "torch": str(torch.__version__),
        },
        "seconds": round(time.monotonic() - started),
        "training_loss": round(average, 5),
        "accepted_by_position": evaluate(drafter, student, encoder, data),
    }
    out_file.with_suffix(".json").write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    return manifest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_file", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args()
    train(arguments.out_file, steps=arguments.steps)
