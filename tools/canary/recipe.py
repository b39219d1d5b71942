"""The training loop, and the export of the weights."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from sm121.oracles import mxfp4
from tools.canary.batches import LONG_ROW, ROW, Encoder, make_batch
from tools.canary.corpus import Corpus, corpus_text, load_corpus
from tools.canary.student import EMBEDDING_NOISE, Student, fake_mxfp4

HEAD_NOISE = 0.01
"""The standard deviation by which an unknown token's row of the output matrix differs from the
shared row.
"""

Progress = Callable[[str], None]


def quantise(values: mxfp4.Floats, rule: mxfp4.ScaleRule) -> tuple[mxfp4.Bytes, mxfp4.Bytes]:
    """Round values to MXFP4, elements to nearest even.

    Args:
        values: The values, [..., K].
        rule: The rule for the scale of a block.

    Returns:
        The packed elements [..., K/2] u8, and the scales [..., K/32] u8.

    Raises:
        ValueError: K is no multiple of 32, or a value is not finite.
    """
    if values.shape[-1] % mxfp4.BLOCK:
        raise ValueError(f"K must be a multiple of {mxfp4.BLOCK}, not {values.shape[-1]}")
    blocks = values.astype(np.float64).reshape(*values.shape[:-1], -1, mxfp4.BLOCK)
    scales = mxfp4.choose_scale(np.abs(blocks).max(axis=-1), rule)
    codes = mxfp4.encode_elements(blocks / mxfp4.decode_scale(scales)[..., None])
    return mxfp4.pack(codes.reshape(values.shape)), scales


def export(student: Student, encoder: Encoder) -> dict[str, np.ndarray[Any, Any]]:
    """Return the shipped tensors.

    Args:
        student: The trained model.
        encoder: The encoder, which has the compact vocabulary.

    Returns:
        The experts packed in MXFP4 (u8), the compact vocabulary (u32), all others as BF16 bits
        (u16).

    Raises:
        ValueError: The packed weights of an expert are not those with which the model was trained.
    """
    tensors: dict[str, np.ndarray[Any, Any]] = {"tokens": np.array(encoder.tokens, dtype=np.uint32)}
    for name, parameter in student.weights.items():
        key = name.replace(":", ".")
        weight = parameter.detach()
        if key.endswith((".gate_up", ".down")):
            packed, scales = quantise(weight.double().numpy(), mxfp4.ScaleRule.CEIL)
            if not np.array_equal(
                mxfp4.dequantise(packed, scales), fake_mxfp4(weight).double().numpy()
            ):
                raise ValueError(f"{key}: the packed weights are not the trained ones")
            tensors[f"{key}_blocks"] = packed.reshape(*scales.shape, mxfp4.BLOCK // 2)
            tensors[f"{key}_scales"] = scales
        else:
            tensors[key] = weight.bfloat16().view(torch.uint16).numpy()
    return tensors


def take_up(student: Student, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """Load exported weights into a student, to continue its training.

    This is the inverse of `export`.

    Args:
        student: The model, whose weights are replaced.
        tensors: The tensors of `export`.
    """
    with torch.no_grad():
        for name, parameter in student.weights.items():
            key = name.replace(":", ".")
            if key.endswith((".gate_up", ".down")):
                blocks = tensors[f"{key}_blocks"]
                scales = tensors[f"{key}_scales"]
                values = mxfp4.dequantise(blocks.reshape(*blocks.shape[:-2], -1), scales)
                parameter.copy_(torch.from_numpy(values))
            else:
                parameter.copy_(torch.from_numpy(tensors[key].copy()).view(torch.bfloat16))


def evaluate(
    student: Student, encoder: Encoder, data: dict[str, Any], batches: int = 8
) -> dict[str, float]:
    """Return the loss and the greedy accuracy on new documents, over the tokens with full weight.

    Args:
        student: The model.
        encoder: Converts documents to compact ids.
        data: The data of corpus.toml.
        batches: The number of batches of eight rows.
    """
    corpus = Corpus(data, seed=987_654)
    student.eval()
    loss = right = count = 0.0
    with torch.no_grad():
        for n in range(batches):
            batch = make_batch(corpus, encoder, 8, ROW if n % 4 else LONG_ROW)
            logits, _ = student(batch)
            judged = batch.weights >= 1
            loss += functional.cross_entropy(
                logits[judged], batch.targets[judged], reduction="sum"
            ).item()
            right += (logits[judged].argmax(-1) == batch.targets[judged]).sum().item()
            count += judged.sum().item()
    student.train()
    return {"loss": loss / count, "accuracy": right / count}


def set_rate(
    optimiser: torch.optim.Optimizer, rate: float, step: int, steps: int, warm: int
) -> None:
    """Set the learning rate of a step.

    It rises over the first steps, then falls along a cosine to a fiftieth of its highest value.

    Args:
        optimiser: The optimiser, whose groups all get the rate.
        rate: The highest rate.
        step: The number of the step, from 0.
        steps: The number of all steps.
        warm: The number of steps over which the rate rises.
    """
    factor = min(1.0, (step + 1) / warm)
    factor *= 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
    for group in optimiser.param_groups:
        group["lr"] = rate * factor


def _learn(
    student: Student,
    encoder: Encoder,
    corpus: Corpus,
    data: dict[str, Any],
    steps: int,
    rate: float,
    progress: Progress,
) -> float:
    """Run the training loop; return the mean loss at its end."""
    matrices = []
    for name, p in student.weights.items():
        if p.dim() > 1 and "bias" not in name:
            matrices.append(p)
    vectors = [p for name, p in student.weights.items() if p.dim() == 1 or "bias" in name]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    started = time.monotonic()
    average = 0.0
    for step in range(steps):
        set_rate(optimiser, rate, step, steps, warm=80)
        batch = make_batch(corpus, encoder, *((4, LONG_ROW) if step % 6 == 5 else (8, ROW)))
        logits, balance = student(batch)
        losses = functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), reduction="none"
        )
        weights = batch.weights.flatten()
        loss = (losses * weights).sum() / weights.sum()
        optimiser.zero_grad(set_to_none=True)
        (loss + 0.005 * balance).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimiser.step()
        average = loss.item() if step == 0 else 0.97 * average + 0.03 * loss.item()
        if step % 50 == 0 or step == steps - 1:
            progress(f"step {step} loss {average:.4f} after {time.monotonic() - started:.0f} s")
        if step and step % 250 == 0:
            progress(f"evaluation {evaluate(student, encoder, data, batches=4)}")
    return average


def train(
    out_file: Path,
    *,
    steps: int = 1150,
    seed: int = 20,
    threads: int = 1,
    rate: float = 3e-3,
    start: Path | None = None,
    progress: Progress = print,
) -> dict[str, Any]:
    """Train the canary, and write it and its manifest.

    A step takes about a second on one core. The bytes are reproducible only on the same machine
    with the same version of PyTorch.

    Args:
        out_file: The file of the weights (safetensors). The manifest (.json) is beside it.
        steps: The number of steps.
        seed: The seed of the weights and of the documents.
        threads: The number of PyTorch's threads.
        rate: The highest learning rate.
        start: An earlier `out_file`, whose training is continued; None for a new training.
        progress: Called with each line of progress.

    Returns:
        The manifest.
    """
    from safetensors.numpy import load_file, save_file

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    data = load_corpus()
    taken_up = load_file(start) if start else {}
    encoder = Encoder(taken_up["tokens"].tolist()) if start else Encoder.for_corpus(data)
    student = Student(len(encoder.tokens), seed)
    if start:
        take_up(student, taken_up)
    progress(f"compact vocabulary: {len(encoder.tokens)} tokens")
    started = time.monotonic()
    loss = _learn(student, encoder, Corpus(data, seed), data, steps, rate, progress)
    tensors = export(student, encoder)
    save_file(tensors, out_file)
    out_file.chmod(0o644)
    start_sha256 = None
    if start:
        start_sha256 = hashlib.sha256(start.read_bytes()).hexdigest()
    recipe = {"steps": steps, "seed": seed, "rate": rate, "threads": threads}
    corpus_sha256 = hashlib.sha256(corpus_text().encode()).hexdigest()
    evaluation = evaluate(student, encoder, data)
    return write_manifest(
        out_file,
        {**recipe, "start_sha256": start_sha256, "corpus_sha256": corpus_sha256},
        seconds=round(time.monotonic() - started),
        training_loss=round(loss, 5),
        evaluation={key: round(value, 5) for key, value in evaluation.items()},
        known_tokens=len(encoder.tokens),
        embedding_noise=EMBEDDING_NOISE,
        head_noise=HEAD_NOISE,
    )


def write_manifest(out_file: Path, recipe: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """Write the manifest of the weights (.json) beside their file.

    Args:
        out_file: The file of the weights, whose digest is in the manifest.
        recipe: The parameters of the training. The version of PyTorch is added.
        **facts: Further keys of the manifest.

    Returns:
        The manifest.
    """
    manifest = {
        "format": 1,
        "sha256": hashlib.sha256(out_file.read_bytes()).hexdigest(),
        "recipe": {**recipe, "torch": str(torch.__version__)},
        **facts,
    }
    out_file.with_suffix(".json").write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    return manifest
