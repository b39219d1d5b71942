"""Test servers that round more than their checkpoint against an oracle that rounds in the same way.

`python -m tools.roundings` computes, for each configuration, the tolerance and the smallest
detected defect of each part. `python -m tools.roundings --rounds NAME` starts vLLM on the CPU once,
with the canary or with its twin whose dense layers contain MXFP4 values, and repeats the requests
round by round, beside random requests of other clients. Both write their rows of
docs/tables/rounding.md.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import random
import secrets
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sm121.answers import (
    log_probabilities,
    oracle_making,
    oracle_texts,
    oracle_tolerance,
)
from sm121.answers.oracle_file import OracleFile
from sm121.answers.oracle_texts import SMALL_MISTAKES
from sm121.answers.oracle_tolerance import OracleReference, computed_tolerance
from sm121.checkpoint import canary
from sm121.client.completion_json import Completion
from sm121.client.completions import Asker, Request
from sm121.core import profile
from sm121.core.configuration import ServerConfiguration, environment_items
from sm121.core.server import Server
from sm121.core.unmet import Unmet
from sm121.core.verdict import Inapplicable, NotRun
from sm121.engines.detection import detect
from sm121.engines.managed import ManagedServer
from sm121.engines.starting import StartLimits
from sm121.engines.vllm import Vllm
from sm121.oracles import gpt_oss, rounding
from sm121.oracles.formats import Rounding
from sm121.oracles.rounded import rounded
from tools import small_oracle, synthetic

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tables" / "rounding.md"
PROFILE = profile.load("cpu-tiny-gpt-oss")
CONFIGURATIONS_HEAD = "|---|---|---|---:|---:|---|---:|"
ROUNDS_HEAD = "|---|---|---:|---|---|---:|"

DENSE = "qkv=mxfp4-even,o=mxfp4-even,lm_head=mxfp4-even"
#: The rounding of the build that reaches 59 tok/s.
FAST = "qkv=mxfp4-ceil,o=mxfp4-ceil,lm_head=mxfp4-ceil,kv=fp8,experts=mxfp8-identity"
FORMATS = (
    "checkpoint", DENSE, "qkv=fp8-channel,o=fp8-channel", "kv=fp8", "kv=fp8-cut",
    "experts=mxfp8", "experts=mxfp8-identity", FAST,
)  # fmt: skip
#: Sizes of a defect: the part is multiplied by one plus this number.
SIZES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)

#: The rounding of each server, and its arguments in addition to those of the profile.
SERVERS = {
    "dense layers, float32": (DENSE, ("--dtype", "float32")),
    "dense layers, BF16": (DENSE, ("--dtype", "bfloat16")),
    "KV cache, float32": ("kv=fp8-cut", ("--dtype", "float32", "--kv-cache-dtype", "fp8")),
    "dense layers, Eagle3, float32": (DENSE, PROFILE.configurations["eagle3"].arguments),
}
_PARTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o", "lm_head": "lm_head"}

# ------------------------------------------------------------------------------------- Checkpoints


def write_twin(checkpoint: Path, folder: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """Write a copy of a checkpoint in which tensors are changed. Its drafter stays the same.

    Args:
        checkpoint: The folder of the checkpoint.
        folder: The folder of the copy, which must not exist.
        change: Returns the new tensor, given the name and the tensor.

    Returns:
        The folder of the copy.
    """
    shutil.copytree(checkpoint, folder)
    for file in folder.glob("*.safetensors"):
        tensors = {}
        for name, t in load_file(file).items():
            tensors[name] = change(name, t).contiguous()
        save_file(tensors, file, {"format": "pt"})
    return folder


def part_of(name: str) -> str | None:
    """Return the part of the model to which a tensor belongs.

    Args:
        name: The name of the tensor in the checkpoint.

    Returns:
        ``qkv``, ``o`` or ``lm_head``; None for another part.
    """
    return _PARTS.get(name.removesuffix(".weight").rpartition(".")[2])


def dense_twin(checkpoint: Path, folder: Path, formats: str = DENSE) -> Path:
    """Write a copy of a checkpoint whose dense layers contain the values of other formats.

    The output matrix counts as a dense layer.

    Args:
        checkpoint: The folder of the checkpoint.
        folder: The folder of the copy, which must not exist.
        formats: The formats, as ``--rounding`` takes them.

    Returns:
        The folder of the copy.
    """
    way = Rounding.parse(formats)

    def change(name: str, tensor: Tensor) -> Tensor:
        part = part_of(name) if name.endswith(".weight") else None
        if part is None:
            return tensor
        return rounding.weight(way, part)(tensor.float()).bfloat16()

    return write_twin(checkpoint, folder, change)


def with_few_tokens(checkpoint: Path, folder: Path, tokens: Sequence[int]) -> Path:
    """Write a copy of a model with a small vocabulary, which is a hundred times as fast.

    Args:
        checkpoint: The folder of the checkpoint.
        folder: The folder of the copy, which must not exist.
        tokens: The ids of the tokens, which are numbered in this order.

    Returns:
        The folder of the copy.
    """
    rows = torch.tensor(tokens)

    def change(name: str, tensor: Tensor) -> Tensor:
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            return tensor[rows]
        return tensor

    write_twin(checkpoint, folder, change)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(tokens)}), "utf-8")
    return folder


@contextlib.contextmanager
def two_prompts() -> Iterator[list[int]]:
    """Return two prompts that are longer than the window, and the tokens of a small vocabulary in
    which they are numbered.

    The vocabulary contains the prompts' own tokens and some thousands more.
    """
    every = dict(oracle_texts.prompts())
    texts = {name: every[name] for name in oracle_texts.ROUNDING_PROMPTS}
    tokens = sorted({*range(0, 100_000, 50)}.union(*texts.values()))
    prompts = []
    for name, ids in texts.items():
        prompts.append((name, [tokens.index(token) for token in ids]))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(oracle_texts, "prompts", lambda: prompts))
        long = ("long", prompts[0][1][:4])
        stack.enter_context(mock.patch.object(oracle_texts, "long_prompt", lambda: long))
        stack.enter_context(mock.patch.object(oracle_texts, "exams", dict))
        stack.enter_context(mock.patch.object(oracle_texts, "GENERATED", 1))
        stack.enter_context(mock.patch.object(oracle_texts, "SMALL_MISTAKES", {}))
        yield tokens


# ---------------------------------------------------------------------------------- Configurations


class _GivenAnswers(Asker):
    """Fixed answers with log-probabilities. The keys are the tokens of the prompt."""

    def __init__(self, values: dict[tuple[int, ...], list[float]]) -> None:
        self._values = values
        self._documented = False

    def ask(self, request: Request) -> Completion:
        """Return the log-probabilities of a prompt."""
        prompt = request.prompt
        assert isinstance(prompt, tuple)
        return Completion("", None, None, None, None, tuple(self._values[prompt]), None, None)


def reference(file: OracleFile, dtype: str) -> OracleReference:
    """Return how a server is compared with an oracle's file, according to the profile.

    Args:
        file: The oracle's file.
        dtype: The dtype of the server: ``float32`` or ``bf16``.
    """
    own = PROFILE.correctness.log_probability_tolerance["float32"]
    tolerance = own
    if dtype in file.rounded:
        tolerance = computed_tolerance(file, dtype)
    if dtype == "float32" and tolerance is not own:
        tolerance = oracle_tolerance.widened(own, tolerance)
    return OracleReference(
        file, f"{dtype}, {file.rounding}", tolerance, {"bf16": "bf16"}.get(dtype)
    )


def _failures(server: Asker, to: OracleReference) -> list[str]:
    """Return the checks that fail on the prompts."""
    names = []
    for check in (log_probabilities.prompts_agree, log_probabilities.roundings_are_absent):
        try:
            check(server, to)
        except Unmet:
            names.append(check.__name__)
        except (NotRun, Inapplicable):
            continue
    return names


@contextlib.contextmanager
def _times(part: str, factor: float) -> Iterator[Callable[[gpt_oss.Weights], gpt_oss.Weights]]:
    """Return the model in which one part is multiplied by a factor: the cache, the experts' inputs,
    or a weight.
    """
    functions = {"kv": "cached", "experts": "expert_inputs"}
    with contextlib.ExitStack() as stack:
        if part in functions:
            own = getattr(rounding, functions[part])
            stack.enter_context(mock.patch.object(
                rounding, functions[part], lambda way: lambda x: own(way)(x) * factor
            ))  # fmt: skip
        yield lambda weights: _scaled(weights, part, factor)


def _scaled(weights: gpt_oss.Weights, part: str, factor: float) -> gpt_oss.Weights:
    if part == "lm_head":
        return dataclasses.replace(weights, head=weights.head[:] * factor)
    if part not in ("qkv", "o"):
        return weights

    def scaled(layer: gpt_oss.Layer) -> gpt_oss.Layer:
        parts = {}
        for name in part:
            parts[name] = (getattr(layer, name)[0] * factor, getattr(layer, name)[1])
        return dataclasses.replace(layer, **parts)

    return dataclasses.replace(weights, layers=tuple(scaled(layer) for layer in weights.layers))


def _smallest(file: OracleFile, weights: gpt_oss.Weights, part: str, dtype: str) -> str:
    """Return the smallest of `SIZES` at which a part that is too large by it is detected."""
    to = reference(file, dtype)
    own = weights.rounding  # a layer's weights, and the products with them, are in float32
    way = own if dtype == "float32" else own.computed_in(dtype)
    server = dataclasses.replace(weights, rounding=way)
    for size in (0.0, *SIZES):
        with _times(part, 1 + size) as change:
            values = {}
            for _, ids in oracle_texts.prompts():
                values[tuple(ids)] = small_oracle.next_token_log_probabilities(
                    change(server), ids
                ).tolist()
        if failed := _failures(_GivenAnswers(values), to):
            assert size, f"{dtype}, {file.rounding}: an honest server fails {failed}"
            return f"{part} {size:.1%}"
    return f"{part} above {SIZES[-1]:.0%}"


def _rows_of(
    shape: str, checkpoint: Path, dtypes: Sequence[str], formats: Sequence[str]
) -> list[str]:
    """Return a row of the page for each configuration and dtype."""
    rows = []
    plain = _work(Rounding())
    loaded = small_oracle.load(checkpoint, torch.float32)
    for text in formats:
        way = Rounding.parse(text)
        file = oracle_making.make(checkpoint, way)
        weights = rounded(loaded, way)
        weights = dataclasses.replace(
            weights, layers=tuple(weights.layers), head=weights.head[:].float()
        )
        parts = []
        for part in text.split(","):
            if "=" in part:
                parts.append(part.partition("=")[0])
        for dtype in dtypes:
            try:
                tolerance = reference(file, dtype).tolerance
                sizes = [
                    _smallest(file, weights, part, dtype) for part in parts or ["lm_head", "o"]
                ]
                numbers = [f"{tolerance.max_abs:.2g}", f"{tolerance.mean_abs:.2g}"]
            except NotRun as why:
                numbers = ["-", "-"]
                sizes = [str(why)]
            cells = [shape, f"`{text}`", dtype, *numbers, ", ".join(sizes)]
            rows.append(f"| {' | '.join(cells)} | {_work(way) / plain:.2f} |")
            print(rows[-1], flush=True)
    return rows


def _work(way: Rounding) -> int:
    """Return how many tokens pass through each layer when a configuration's file is computed.

    The number is summed over all prompts.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(oracle_texts, "GENERATED", 12))
        fixed, (_, long) = dict(_PROMPTS), _LONG
        stack.enter_context(mock.patch.object(oracle_texts, "SMALL_MISTAKES", SMALL_MISTAKES))
        texts = oracle_making._texts(fixed, long, way)
    return sum(len(text.ids) + text.more for text in texts)


_PROMPTS = oracle_texts.prompts()
_LONG = oracle_texts.long_prompt()


def _configurations(layers: int) -> Iterator[list[str]]:
    """Yield the rows of the canary, then those of gpt-oss-20b's shape with some of its layers."""
    plain = canary.build(ROOT / ".cache" / "canary" / "bf16", "bf16")
    with tempfile.TemporaryDirectory() as name, two_prompts() as tokens:
        folder = Path(name)
        small = with_few_tokens(plain, folder / "canary", tokens)
        yield _rows_of("canary", small, ("float32", "bf16"), FORMATS)
        whole = synthetic.write(folder / "whole", "gpt-oss-20b", layers=layers)
        wide = with_few_tokens(whole, folder / "wide", tokens)
        shutil.rmtree(whole)
        shape = f"gpt-oss-20b's, {layers} layer{'s' * (layers > 1)}"
        formats = ("checkpoint", DENSE, "kv=fp8", "experts=mxfp8-identity", FAST)
        yield _rows_of(shape, wide, ("bf16",), formats)


# ------------------------------------------------------------------------------------------ Rounds


@contextlib.contextmanager
def _other_clients(asker: Asker, draw: random.Random) -> Iterator[None]:
    """Send requests of other clients, with random lengths and counts, while this context is
    open."""
    tokens = [token for _, ids in oracle_texts.prompts() for token in ids]
    over = threading.Event()

    def one() -> Request:
        ids = draw.choices(tokens, k=draw.randint(1, 600))
        told = draw.random() < 0.3
        return Request(tuple(ids), draw.randint(1, 24), prompt_log_probabilities=told)

    def ask() -> None:
        while not over.is_set():
            asker.ask_together([one() for _ in range(draw.randint(1, 4))])
            over.wait(draw.random())

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _judged(to: OracleReference, server: Server, seed: int) -> list[str]:
    """Return the failures of the oracle tests on a server in one round."""
    asker = Asker(server)
    draw = random.Random(seed)
    texts = list[str]()
    shuffled = draw.sample(oracle_texts.prompts(), len(oracle_texts.prompts()))
    long = [oracle_texts.long_prompt()]
    checks: dict[str, Callable[[Asker, OracleReference], Any]] = {
        "prompts": log_probabilities.prompts_agree,
        "roundings": log_probabilities.roundings_are_absent,
        "generated": functools.partial(log_probabilities.generations_agree, chosen=shuffled),
        "past the context": functools.partial(log_probabilities.generations_agree, chosen=long),
    }
    for mistake in SMALL_MISTAKES:
        checks[mistake] = functools.partial(log_probabilities.mistake_is_absent, mistake=mistake)
    with _other_clients(asker, draw):
        for name, check in checks.items():
            try:
                print(f"{name}: {check(asker, to) or 'absent'}", flush=True)
            except (Unmet, NotRun) as fact:
                texts.append(f"{type(fact).__name__}: {name}: {' '.join(f'{fact}'.split())}")
    return texts


@contextlib.contextmanager
def _started(name: str, folder: Path) -> Iterator[Server]:
    """Start the server that has this name."""
    formats, arguments = SERVERS[name]
    model = canary.build(ROOT / ".cache" / "canary" / "bf16", "bf16")
    if formats == DENSE:
        model = dense_twin(model, folder / "twin")
    configuration = ServerConfiguration(
        name=name.replace(" ", "-").replace(",", ""),
        engine="vllm",
        python=sys.executable,
        model=str(model),
        served_name=PROFILE.model.served_name,
        arguments=(
            *PROFILE.engine.arguments, *(a.replace("{model}", str(model)) for a in arguments),
        ),
        environment=environment_items(PROFILE.engine.environment, {}),
        speaking_worker=True,
    )  # fmt: skip
    limits = StartLimits(ready_s=600, stalled_s=300, stop_s=20)
    managed = ManagedServer(configuration, Vllm(), limits, folder, "roundings")
    try:
        yield managed.start()
    finally:
        managed.stop()


def _rounds(name: str, most: int, minutes: float) -> tuple[str, bool]:
    """Send rounds to a server; return its row of the page, and whether all rounds passed."""
    intact = canary.build(ROOT / ".cache" / "canary" / "bf16", "bf16")
    formats = Rounding.parse(SERVERS[name][0])
    file = oracle_making.kept_or_made(intact, formats, ROOT / ".cache" / "oracle")
    began = time.monotonic()
    seconds = list[float]()
    red = 0
    texts = set[str]()
    with tempfile.TemporaryDirectory() as folder, _started(name, Path(folder)) as server:
        to = oracle_tolerance.reference_for(file, server, PROFILE)
        while len(seconds) < most and time.monotonic() - began < 60 * minutes:
            begin = time.monotonic()
            seed = secrets.randbits(32)
            failed = _judged(to, server, seed)
            seconds.append(time.monotonic() - begin)
            red += any(text.startswith("Unmet") for text in failed)
            texts |= {*failed}
            print(f"round {len(seconds)}, seed {seed}, {seconds[-1]:.0f} s: {failed}", flush=True)
        version = detect(server).identity
    cells = []
    for k in ("Unmet", "NotRun"):
        cells.append("; ".join(t for t in sorted(texts) if t.startswith(k)))
    wrong, unasked = (cell.replace("|", "\\|") or "nothing" for cell in cells)
    return (
        f"| {name} | vLLM {version} | {len(seconds) - red} of {len(seconds)} | {wrong} | {unasked} "
        f"| {statistics.median(seconds):.0f} |"
    ), not red


def _put(rows: list[str], head: str, output: Path) -> None:
    """Write the page with rows added to the table with this head.

    They replace rows with the same first cells.
    """
    cells = 3 if head == CONFIGURATIONS_HEAD else 1
    replaced = {tuple(row.split(" | ")[:cells]) for row in rows}
    lines = PAGE.read_text("utf-8").splitlines()
    lines = [line for line in lines if tuple(line.split(" | ")[:cells]) not in replaced]
    begin = lines.index(head) + 1
    lines[begin:begin] = rows
    output.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def main() -> int:
    """Write the table of configurations, or a row for the rounds of a server.

    The exit status is 1 if a round failed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", choices=SERVERS, metavar="NAME", help=", ".join(SERVERS))
    parser.add_argument("--most", type=int, default=20, help="rounds")
    parser.add_argument("--minutes", type=float, default=600.0, help="no round begins after these")
    parser.add_argument("--layers", type=int, default=1, help="of the real shape")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    if options.rounds:
        row, green = _rounds(options.rounds, options.most, options.minutes)
        _put([row], ROUNDS_HEAD, options.output)
        return int(not green)
    rows = [row for shape in _configurations(options.layers) for row in shape]
    _put(rows, CONFIGURATIONS_HEAD, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
