"""Train the canary's Eagle3 drafter: the model for training, the training loop, and the export.

`python -m tools.canary.drafter OUT.safetensors` (50 minutes on one core) writes
fixtures/canary/drafter.safetensors and its manifest; `sm121.checkpoint.canary` expands them to a
checkpoint. EAGLE-3 (Li et al. 2025): a Llama layer reads three hidden states of the target model
and the next token, and predicts the token after it. From the second draft token on, its own output
takes the place of the target's hidden states, in training as in use ("training-time test").

The drafter learns the canary's distribution, not the tokens of the corpus, because a draft token is
accepted if the canary would generate it. It first trains on documents of the corpus. It then trains
on the canary's own answers to beginnings of documents, generated without a stop token, as the suite
requests them.
"""

import argparse
import hashlib
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tools.canary.batches import LONG_ROW, WINDOW, Batch, Encoder, make_batch
from tools.canary.corpus import CHUNK, Corpus, load_corpus
from tools.canary.recipe import set_rate, take_up, write_manifest
from tools.canary.student import EMBEDDING_NOISE, LAYERS, VOCABULARY, Student, round_bf16

HIDDEN = 256
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
INTERMEDIATE = 384
LAYER_IDS = (2, 3, 4)
"""The numbers of the layers after which the drafter reads the hidden states: the second, third and
fourth layer of the canary, as vLLM counts them.
"""
THETA = 10_000.0
EPS = 1e-5
GUESSES = 3
"""The number of draft tokens of one draft in training."""
ANSWERS = 2400
"""The number of the canary's answers that the drafter is trained on."""
ANSWER_TOKENS = 64
"""The number of tokens of each of these answers."""
LONGEST = 200
"""The number of tokens of the longest prompt of these answers."""
_HELD_OUT = 96
"""The number of answers for the evaluation, which the training does not use."""

Progress = Callable[[str], None]
Answer = tuple[list[int], list[int]]
"""The token ids of a prompt, and those of the canary's answer to it."""


def _rotary(length: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [length, 32] of the plain rotary embedding (Su et al. 2021), whose two
    halves are separate."""
    frequency = THETA ** -(torch.arange(HEAD_DIM // 2, dtype=torch.float64) / (HEAD_DIM // 2))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angles.cos().float(), angles.sin().float()


class Drafter(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """The layer of `vllm/model_executor/models/llama_eagle3.py`, with the compact vocabulary."""

    def __init__(self, known: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int, std: float) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(rows, columns, generator=generator) * std)

        width = HEADS * HEAD_DIM
        kv = KV_HEADS * HEAD_DIM
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
        self.cos, self.sin = _rotary(LONG_ROW)

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
        cos = self.cos[:length]
        sin = self.sin[:length]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def combine(self, states: Tensor) -> Tensor:
        """Combine three hidden states of the target to the first input of a draft, [B, T, hidden].

        Args:
            states: The hidden states, [B, T, 3 * hidden].
        """
        return self._linear(states, "fc")

    def guess(
        self, hidden: Tensor, embedded: Tensor, mask: Tensor, earlier: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Predict one draft token at each position.

        Position u of draft token g attends to the first draft token up to u - g, and to one
        position of each draft token between, as its KV cache does in use.

        Args:
            hidden: The hidden state of each position, [B, T, hidden].
            embedded: The embedding of the token that each position reads, [B, T, hidden].
            mask: The additive attention mask, [B, 1, T, T].
            earlier: The keys and values of the earlier draft tokens. This call appends its own.

        Returns:
            The logits [B, T, known], and the hidden state for the next draft token.
        """
        normed = torch.cat(
            (self._norm(embedded, "input_layernorm"), self._norm(hidden, "hidden_norm")), -1
        )
        q = self._rotate(self._heads(normed, "q_proj")) * HEAD_DIM**-0.5
        k = self._rotate(self._heads(normed, "k_proj"))
        v = self._heads(normed, "v_proj")
        group = HEADS // KV_HEADS
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        earlier.append((k, v))
        number = len(earlier) - 1
        length = q.shape[-2]
        first_k, first_v = earlier[0]
        at = torch.arange(length)
        reach = at[None, :] > at[:, None] - number if number else at[None, :] > at[:, None]
        scores = (q.bfloat16() @ first_k.bfloat16().transpose(-1, -2)).float()
        scores = (scores + mask).masked_fill(reach, -1e9)
        apart = []
        values = []
        for guess in range(1, number + 1):
            # The position of the earlier draft token to which this one attends. It is as many
            # positions back as there are draft tokens between the two.
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


def _watch(student: Student, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the canary's logits [B, T, known + 1] and hidden states [B, T, 3 * hidden]."""
    x = functional.embedding(batch.ids, round_bf16(student.weights["embed_tokens"]))
    noise = (torch.randint(0, 2, x.shape) * 2 - 1) * EMBEDDING_NOISE
    x = torch.where((batch.ids == student.known)[..., None], x + noise, x)
    states = []
    for n in range(LAYERS):
        x = x + student._attention(n, x, batch.full if n % 2 else batch.sliding)
        x = x + student._experts(n, x)[0]
        if n + 1 in LAYER_IDS:
            states.append(x)
    logits = functional.linear(
        student._norm(x, "norm").bfloat16(), student.weights["lm_head"].bfloat16()
    ).float()
    logits[..., -1] += math.log(VOCABULARY - student.known)
    return logits, torch.cat(states, -1)


def _lessons(
    drafter: Drafter, student: Student, batch: Batch, guesses: int = GUESSES
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return what the drafter is trained with, for each draft token.

    These are its logits, the canary's logits at the same position, and the weight of the position.
    """
    with torch.no_grad():
        target, states = _watch(student, batch)
        embedded = functional.embedding(batch.targets, round_bf16(student.weights["embed_tokens"]))
        noise = (torch.randint(0, 2, embedded.shape) * 2 - 1) * EMBEDDING_NOISE
        embedded = torch.where(
            (batch.targets == student.known)[..., None], embedded + noise, embedded
        )
        # Position u reads token u + 1 and predicts token u + 2: the canary's prediction at u + 1.
        target = target.roll(-1, 1)
        weights = batch.weights.roll(-1, 1)
        # The document ends with the read token, or the token to predict is unknown.
        weights = weights * (batch.weights > 0) * (target.argmax(-1) != student.known)
        weights[:, -1] = 0
    hidden = drafter.combine(states)
    earlier: list[tuple[Tensor, Tensor]] = []
    result = []
    for number in range(guesses):
        logits, out = drafter.guess(hidden, embedded, batch.full.float(), earlier)
        usable = weights.clone()
        for back in range(1, number + 1):  # the draft tokens before it belong to the same document
            usable *= (batch.weights.roll(back, 1) > 0).float()
        usable[:, :number] = 0
        result.append((logits, target, usable))
        hidden = out.roll(1, 1)
    return result


def _prompts(data: dict[str, Any], number: int, seed: int) -> list[str]:
    """Return different beginnings of corpus documents, each ending before an answer."""
    corpus = Corpus(data, seed)
    chosen = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < number:
        pieces = corpus.document()
        answers = []
        for n, piece in enumerate(pieces):
            if piece.weight >= 1.0 and n:
                answers.append(n)
        if answers and not any(isinstance(piece.text, int) for piece in pieces):
            before = pieces[: chosen.choice(answers)]
            found["".join(str(piece.text) for piece in before).rstrip()] = None
    return list(found)


def _answers(texts: Sequence[str], tokens: int = ANSWER_TOKENS) -> list[Answer]:
    """Return the canary's greedy answers from vLLM in float32, generated without a stop token."""
    from sm121.checkpoint import canary

    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = canary.build(Path(folder) / "bf16", "bf16")
        model = LLM(str(checkpoint), dtype="float32", enforce_eager=True, max_model_len=1024)
        said = model.generate(
            list(texts), SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        )
    return [(list(one.prompt_token_ids), list(one.outputs[0].token_ids)) for one in said]


def _answered(chosen: Sequence[Answer], encoder: Encoder) -> Batch:
    """Return a row for each answer, in which the prompt precedes the answer."""
    length = max(len(prompt) + len(answer) for prompt, answer in chosen)
    ids = torch.full((len(chosen), length + 1), len(encoder.tokens))
    weights = torch.zeros(len(chosen), length + 1)
    for row, (prompt, answer) in enumerate(chosen):
        whole = encoder.compact([*prompt, *answer])
        ids[row, : len(whole)] = torch.tensor(whole)
        weights[row, 1 : len(prompt)] = CHUNK
        weights[row, len(prompt) : len(whole)] = 1.0
    at = torch.arange(length)
    full = at[None, :] <= at[:, None]
    sliding = full & (at[:, None] - at[None, :] < WINDOW)
    nothing = torch.zeros(len(chosen), 1, length, length, dtype=torch.bfloat16)
    masks = []
    for mask in (full, sliding):
        masks.append(nothing.masked_fill(~mask, -1e9))
    return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:], *masks)


def _evaluate(drafter: Drafter, student: Student, batches: Sequence[Batch]) -> list[float]:
    """Return the greedy acceptance by position on the canary's answers: the share of first draft
    tokens that are right, of pairs of draft tokens that are both right, and so on."""
    right = [0.0] * GUESSES
    count = 0.0
    with torch.no_grad():
        for batch in batches:
            told = _lessons(drafter, student, batch)
            hits = []
            for logits, target, weights in told:
                hits.append((logits.argmax(-1) == target[..., :-1].argmax(-1)) & (weights > 0))
            # A draft begins at u; its token g is at u + g.
            judged = (told[0][2] >= 1).float()
            for g in range(1, GUESSES):
                judged *= (told[g][2].roll(-g, 1) >= 1).float()
            chain = judged.bool()
            count += judged.sum().item()
            for g in range(GUESSES):
                chain = chain & hits[g].roll(-g, 1)
                right[g] += chain.sum().item()
    return [round(hit / count, 4) for hit in right]


def _save(drafter: Drafter, encoder: Encoder, out_file: Path) -> None:
    """Write the shipped files: the weights as BF16 bits, and the ids of the compact vocabulary."""
    from safetensors.numpy import save_file

    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, weight in drafter.weights.items():
        tensors[name] = weight.detach().bfloat16().view(torch.uint16).numpy()
    save_file({**tensors, "tokens": np.array(encoder.tokens, dtype=np.uint32)}, out_file)
    out_file.chmod(0o644)


def _learn(
    drafter: Drafter,
    student: Student,
    batches: Sequence[Callable[[], Batch]],
    rate: float,
    progress: Progress,
) -> float:
    """Run one part of the training; return the mean loss at its end."""
    optimiser = torch.optim.AdamW(
        drafter.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.02, fused=True
    )
    started = time.monotonic()
    average = 0.0
    for step, make in enumerate(batches):
        set_rate(optimiser, rate, step, len(batches), warm=60)
        loss = torch.zeros(())
        for logits, target, weights in _lessons(drafter, student, make()):
            kept = weights > 0
            wanted = target[kept][:, :-1].softmax(-1)
            surprise = functional.cross_entropy(logits[kept], wanted, reduction="none")
            loss = loss + (surprise * weights[kept]).sum() / weights[kept].sum() / GUESSES
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimiser.step()
        average = loss.item() if step == 0 else 0.97 * average + 0.03 * loss.item()
        if step % 25 == 0 or step == len(batches) - 1:
            progress(f"step {step} loss {average:.4f} after {time.monotonic() - started:.0f} s")
    return average


def _shipped() -> bytes:
    """Return the weights of the canary that the suite ships."""
    return (files("sm121.fixtures") / "canary" / "weights.safetensors").read_bytes()


def _teacher(weights: bytes) -> tuple[Student, Encoder]:
    """Return the canary as it is shipped, without gradients, and its tokens."""
    from safetensors.numpy import load

    tensors = load(weights)
    encoder = Encoder(tensors["tokens"].tolist())
    student = Student(len(encoder.tokens), 0).eval()
    take_up(student, tensors)
    for parameter in student.parameters():
        parameter.requires_grad_(False)
    return student, encoder


def _beginner(student: Student, tokens: int, seed: int, start: Path | None) -> Drafter:
    """Return an untrained drafter with the canary's output matrix, or a drafter with the weights of
    an earlier training.
    """
    from safetensors.numpy import load

    earlier = load(start.read_bytes()) if start else {}
    drafter = Drafter(tokens, seed)
    with torch.no_grad():
        drafter.weights["lm_head"].copy_(student.weights["lm_head"][:-1])
        for name, bits in earlier.items():
            if name in drafter.weights:
                drafter.weights[name].copy_(torch.from_numpy(bits.copy()).view(torch.bfloat16))
    return drafter


def _unseen(data: dict[str, Any], encoder: Encoder) -> list[Batch]:
    """Return documents that no training uses."""
    corpus = Corpus(data, seed=987_654)
    return [make_batch(corpus, encoder, 8, 512 if n % 3 == 2 else 256) for n in range(6)]


def _held_out_and_learnt(data: dict[str, Any], seed: int) -> tuple[list[Answer], list[Answer]]:
    """Return the canary's answers to short prompts: those for evaluation, and those to learn."""
    short = [one for one in _answers(_prompts(data, ANSWERS, seed)) if len(one[0]) <= LONGEST]
    return short[:_HELD_OUT], short[_HELD_OUT:]


def _sampled(learnt: Sequence[Answer], encoder: Encoder, chance: random.Random) -> Batch:
    """Return a batch of twelve answers."""
    return _answered(chance.sample(learnt, 12), encoder)


def _documents(corpus: Corpus, encoder: Encoder, step: int) -> Callable[[], Batch]:
    """Return a function that makes the batch of documents of one step."""
    size = (4, 512) if step % 6 == 5 else (8, 256)
    return lambda: make_batch(corpus, encoder, *size)


def train(
    out_file: Path,
    *,
    start: Path | None = None,
    steps: int = 1500,
    answer_steps: int = 600,
    seed: int = 3,
    rate: float = 3e-3,
    answer_rate: float = 1e-3,
    progress: Progress = print,
) -> dict[str, Any]:
    """Train the drafter, and write it and its manifest.

    A step has 2,048 tokens of documents; an answer step has 12 answers and a third as many
    documents.

    Args:
        out_file: The file of the weights (safetensors). The manifest (.json) is beside it.
        start: The weights of an earlier training, with which the training on documents is left out.
        steps: The number of steps on documents.
        answer_steps: The number of steps on the canary's answers.
        seed: The seed of the training.
        rate: The highest learning rate of the first part.
        answer_rate: The highest learning rate of the second part.
        progress: Called with each line of progress.

    Returns:
        The manifest.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    began = time.monotonic()
    student, encoder = _teacher(_shipped())
    data = load_corpus()
    corpus = Corpus(data, seed)
    drafter = _beginner(student, len(encoder.tokens), seed, start)
    documents = partial(_documents, corpus, encoder)
    if start is None:
        _learn(drafter, student, [documents(n) for n in range(steps)], rate, progress)
        _save(drafter, encoder, out_file)
    held_out, learnt = _held_out_and_learnt(data, seed)
    progress(f"{len(learnt)} answers of {ANSWER_TOKENS} tokens to learn from")
    judged = [_answered(held_out[n : n + 12], encoder) for n in range(0, len(held_out), 12)]
    progress(f"accepted of answers, by position: {_evaluate(drafter, student, judged)}")
    answers = partial(_sampled, learnt, encoder, random.Random(seed))
    batches = [documents(n) if n % 4 == 3 else answers for n in range(answer_steps)]
    loss = _learn(drafter, student, batches, answer_rate, progress)
    _save(drafter, encoder, out_file)
    recipe = {"steps": steps, "answer_steps": answer_steps, "seed": seed, "rate": rate}
    return write_manifest(
        out_file,
        {**recipe, "answer_rate": answer_rate, "guesses": GUESSES},
        canary_sha256=hashlib.sha256(_shipped()).hexdigest(),
        start_sha256=hashlib.sha256(start.read_bytes()).hexdigest() if start else None,
        seconds=round(time.monotonic() - began),
        training_loss=round(loss, 5),
        accepted_of_documents=_evaluate(drafter, student, _unseen(data, encoder)),
        accepted_of_answers=_evaluate(drafter, student, judged),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_file", type=Path)
    parser.add_argument("--start", type=Path, metavar="FILE", help="go on from these weights")
    parser.add_argument("--answer-steps", type=int, default=600)
    arguments = parser.parse_args()
    train(arguments.out_file, start=arguments.start, answer_steps=arguments.answer_steps)
