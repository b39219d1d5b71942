"""What the oracle says of the fixed prompts on one checkpoint: made once, and kept. `sm121 golden
CHECKPOINT -o FILE` makes the file. The correctness level makes it where there is none for the
served checkpoint. Beside what gpt-oss says it has what an honest engine would say that rounds
(`sm121.oracles.rounding`), and what models with one small mistake would say."""

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import json
import math
import time
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sm121 import __version__
from sm121.checkpoint.identity import identity
from sm121.core import data_file, digest
from sm121.core.data_file import DataTable, Record
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.lock_file import open_lock
from sm121.oracles.formats import CHECKPOINT, EXACT, W4A8, Rounding

if TYPE_CHECKING:
    from sm121.oracles.gpt_oss import Layer, Weights
    from sm121.oracles.scores import Change, Scores, Text

FORMAT: Literal[1] = 1
"""Raised when a file of before cannot be used any more, or the oracle would say something else."""

GENERATED = 12
"""Tokens that the model goes on after each prompt."""

LONG_PROMPT_TOKENS = 4090
"""Beyond YaRN's original 4096 positions with what follows, over 32 blocks of 128."""

#: Up to this many bytes of weights the oracle computes in float64, in seconds; else in float32.
_SMALL = 1 << 30


class Place(Record):
    """One place of a text: the most likely tokens there, most likely first, and their log p."""

    ids: list[int]
    values: list[float]


class Scored(Record):
    """A prompt of T tokens."""

    tokens: int
    #: log p of each token that really follows, [T - 1]; of a long prompt none.
    following: list[float]
    #: After each token of the prompt; of a long prompt after the last one.
    places: list[Place]
    #: The most likely tokens one after the other, and the places where they are chosen.
    generated: list[int] = Field(default=[])
    generated_places: list[Place] = Field(default=[])


class OracleFile(Record):
    """The file of ``sm121 golden``. Log-probabilities are in nats."""

    format: Literal[1] = FORMAT
    suite: str
    made: str
    #: What tells the checkpoint and the prompts from others.
    checkpoint: str
    tokenizer: str | None
    prompts_digest: str
    #: The formats that it computes with, as a server has them (`sm121.oracles.rounding`).
    rounding: str = "checkpoint"
    #: What the oracle computed in, and for how long.
    dtype: str
    seconds: float
    prompts: dict[str, Scored]
    #: By what an honest engine rounds, and by prompt: log p of each token that really follows.
    rounded: dict[str, dict[str, list[float]]]
    #: By the same: the most likely tokens where the intact model chooses what it generates.
    rounded_places: dict[str, dict[str, list[Place]]]
    #: By mistake, and by each of its prompts (`SMALL_MISTAKES`): the same.
    mistakes: dict[str, dict[str, list[float]]] = Field(default={})
    #: By the formats of a server that rounds something else than it should, and by each of
    #: `ROUNDING_PROMPTS`: the same.
    other_roundings: dict[str, dict[str, list[float]]] = Field(default={})
    #: What the checkpoint's own mathematics says, which rounds nothing: of `exams`, of long prompts
    #: of other lengths, and of `prompts` where the file rounds.
    exact: dict[str, Scored] = Field(default={})

    @property
    def unrounded(self) -> dict[str, Scored]:
        """What the checkpoint's own mathematics says of each text, by its name."""
        return self.exact if self.rounding != CHECKPOINT else {**self.prompts, **self.exact}


def prompts() -> list[tuple[str, list[int]]]:
    """Fixed prompts as token ids of the real vocabulary, across the sliding window's edge."""
    text = (files("sm121.fixtures") / "canary" / "prompts.json").read_text("utf-8")
    return [(entry["name"], entry["token_ids"]) for entry in json.loads(text)["prompts"]]


def long_prompt(tokens: int = LONG_PROMPT_TOKENS) -> tuple[str, list[int]]:
    """A prompt of so many tokens, with a name: the longest of `prompts`, over and over."""
    name, longest = max(prompts(), key=lambda prompt: len(prompt[1]))
    ids = longest * (tokens // len(longest) + 1)
    return f"{name}, over and over", ids[:tokens]


class ExamText(DataTable):
    """The facts of an exam as one chat, each question with its right answer behind it."""

    token_ids: tuple[int, ...]
    #: By question: the first token of its answer, and the one behind the last.
    answers: dict[str, tuple[int, int]]

    @property
    def name(self) -> str:
        """What tells it from other texts."""
        return f"exam {digest.of([self.token_ids])[:12]}"


def exams() -> dict[str, ExamText]:
    """The text of each shipped exam, by its name."""
    text = (files("sm121.fixtures") / "answers" / "right-answers.json").read_text("utf-8")
    return {name: ExamText.model_validate(table) for name, table in json.loads(text).items()}


def _with_window(weights: "Weights", shift: int) -> "Weights":
    config = dataclasses.replace(weights.config, window=weights.config.window + shift)
    return dataclasses.replace(weights, config=config)


def _without_sink(weights: "Weights", layer: int, head: int) -> "Weights":
    from sm121.oracles.gpt_oss import Latest

    def read(n: int) -> "Layer":
        one = weights.layers[n]
        sinks = one.sinks.clone()
        sinks[head] = -math.inf
        return dataclasses.replace(one, sinks=sinks) if n == layer else one

    return dataclasses.replace(weights, layers=Latest(len(weights.layers), read))


#: The prompts that show what else is rounded than should be.
ROUNDING_PROMPTS = ("tool call", "mixture of 300")

_PAST_THE_WINDOW = ("tool call", "mixture of 300", "mixture of 600")

#: Mistakes too small for the tolerance of a coarse dtype, and the prompts that show each best.
SMALL_MISTAKES: "dict[str, tuple[Change, tuple[str, ...]]]" = {
    "a sliding window of 127": (functools.partial(_with_window, shift=-1), _PAST_THE_WINDOW),
    "a sliding window of 129": (functools.partial(_with_window, shift=1), _PAST_THE_WINDOW),
    "one head without its sink": (
        functools.partial(_without_sink, layer=1, head=0),
        ("languages and code", "capitals", "prose of 127"),
    ),
}


def make(
    checkpoint: Path,
    rounding: Rounding = EXACT,
    depths: Iterable[int] = (),
    device: str = "cpu",
    *,
    kept: Path | None = None,
    say: Callable[[int, int], None] = lambda _done, _all: None,
) -> OracleFile:
    """Compute what the oracle says of a checkpoint that is served in some formats, by default its
    own, on a device of PyTorch; at these depths too, in tokens. A computation that was stopped goes
    on in the folder ``kept``; ``say`` is called with the steps done and the steps in all. Raises
    what `sm121.oracles.scores.score` raises."""
    import torch

    from sm121.oracles import scores

    ways = _ways(rounding)
    begun = time.monotonic()
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    dtype = torch.float64 if size <= _SMALL else torch.float32
    fixed, (long_name, long_ids) = dict(prompts()), long_prompt()
    texts, exact = _texts(fixed, long_ids, rounding), _exact_texts(fixed, rounding, depths)
    texts += exact.values()
    each = iter(scores.score(checkpoint, texts, dtype=dtype, device=device, cache=kept, say=say))
    scored, *by_way = (
        {name: _scored(next(each), len(ids)) for name, ids in fixed.items()} for _ in (None, *ways)
    )
    scored[long_name] = _scored(next(each), len(long_ids))
    rounded = dict(zip(ways, by_way, strict=True))
    tokenizer = checkpoint / "tokenizer.json"
    return OracleFile(
        suite=__version__,
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        checkpoint=identity(str(checkpoint)),
        tokenizer=digest.of_files(checkpoint, [tokenizer]) if tokenizer.is_file() else None,
        prompts_digest=_prompts_digest(),
        rounding=rounding.formats,
        dtype=str(dtype).removeprefix("torch."),
        seconds=round(time.monotonic() - begun, 1),
        prompts=scored,
        rounded={way: {n: t.following for n, t in of.items()} for way, of in rounded.items()},
        rounded_places={
            path: {name: text.generated_places for name, text in of.items()}
            for path, of in rounded.items()
        },
        mistakes={
            mistake: {name: _numbers(next(each)) for name in names}
            for mistake, (_, names) in SMALL_MISTAKES.items()
        },
        other_roundings={
            other: {name: _numbers(next(each)) for name in ROUNDING_PROMPTS}
            for other in rounding.others
        },
        exact={
            n: _scored(next(each), len(t.ids), not n.startswith("exam")) for n, t in exact.items()
        },
    )


def _exact_texts(
    fixed: dict[str, list[int]], formats: Rounding, depths: Iterable[int]
) -> "dict[str, Text]":
    from sm121.oracles.scores import Text

    named = {name: tuple(ids) for name, ids in fixed.items() if formats != EXACT}
    named |= {text.name: text.token_ids for text in exams().values()}
    deep = {f"{tokens} tokens": tuple(long_prompt(tokens)[1]) for tokens in depths}
    return {name: Text(ids) for name, ids in named.items()} | {
        name: Text(ids, whole=False, more=GENERATED) for name, ids in deep.items()
    }


def _ways(formats: Rounding) -> dict[str, Rounding]:
    """How honest engines round that serve these formats, by name. Where what is computed is rounded
    to few bits, float32 decides now and then otherwise than exact arithmetic."""
    ways = {"bf16": formats.computed_in("bf16")}
    if formats == EXACT:
        ways["w4a8"] = W4A8
    elif formats.of_activations:
        ways["float32"] = formats.computed_in("float32")
    return ways


def _texts(fixed: dict[str, list[int]], long_ids: list[int], formats: Rounding) -> "list[Text]":
    """What the oracle scores: the prompts exact and with each rounding, the long prompt, the
    prompts of each small mistake, and those of other formats."""
    from sm121.oracles.scores import Text

    texts = [Text(tuple(ids), rounding=formats, more=GENERATED) for ids in fixed.values()]
    texts += [
        dataclasses.replace(text, rounding=way, follows=n)
        for way in _ways(formats).values()
        for n, text in enumerate(texts)
    ]
    texts.append(Text(tuple(long_ids), rounding=formats, whole=False, more=GENERATED))
    texts += [
        Text(tuple(fixed[name]), change=change, rounding=formats)
        for change, names in SMALL_MISTAKES.values()
        for name in names
    ]
    return texts + [
        Text(tuple(fixed[name]), rounding=other)
        for other in formats.others.values()
        for name in ROUNDING_PROMPTS
    ]


def _scored(scores: "Scores", tokens: int, with_places: bool = True) -> Scored:
    ids, values = scores.generated_top_ids, scores.generated_top
    generated = [] if ids is None or values is None else _places(ids.tolist(), values.tolist())
    return Scored(
        tokens=tokens,
        following=_numbers(scores),
        places=_places(scores.top_ids.tolist(), scores.top.tolist()) if with_places else [],
        generated=list(scores.generated),
        generated_places=generated,
    )


def _places(ids: list[list[int]], values: list[list[float]]) -> list[Place]:
    return [
        Place(ids=i, values=[round(value, 7) for value in v])
        for i, v in zip(ids, values, strict=True)
    ]


def _numbers(scores: "Scores") -> list[float]:
    """Raises ValueError where the oracle itself comes to no number."""
    values = scores.following.tolist()
    if not all(map(math.isfinite, values)):
        raise ValueError("the oracle comes to no number on this checkpoint: its weights overflow")
    return [round(value, 7) for value in values]


def _prompts_digest() -> str:
    mistakes = [(name, names) for name, (_, names) in SMALL_MISTAKES.items()]
    return digest.of([FORMAT, GENERATED, prompts(), long_prompt(), mistakes])


def save(file: OracleFile, path: Path) -> None:
    """Write it, whole or not at all."""
    write_text(file.model_dump_json() + "\n", path)


def load(path: Path) -> OracleFile:
    """Read it. Raises UsageError: it is none, or of another release with other prompts."""
    file = data_file.read_json(path, OracleFile, f"{path}", "`sm121 golden`")
    if file.prompts_digest != _prompts_digest():
        raise UsageError(
            f"{path}: made by release {file.suite} with other prompts; make it anew: "
            "sm121 golden CHECKPOINT -o FILE"
        )
    return file


def shipped(checkpoint: Path, formats: str = "checkpoint") -> OracleFile | None:
    """What the suite has of the canary's BF16 twin, which takes two cores a minute to make; None of
    any other checkpoint, in other formats than it has, and with other prompts."""
    name = "oracle.json" if formats == "checkpoint" else f"oracle-{formats}.json"
    shipped_file = files("sm121.fixtures") / "canary" / name
    if not shipped_file.is_file():
        return None
    file = OracleFile.model_validate_json(shipped_file.read_text("utf-8"))
    fits = (identity(str(checkpoint)), _prompts_digest()) == (file.checkpoint, file.prompts_digest)
    return file if fits else None


def refuse_other(file: OracleFile, origin: Path, checkpoint: Path) -> None:
    """Only what was made of the served checkpoint says what is right. Raises UsageError: one line
    that names both."""
    if (served := identity(str(checkpoint))) != file.checkpoint:
        raise UsageError(
            f"--reference {origin}: it was made of another checkpoint ({file.checkpoint}) than "
            f"{checkpoint} ({served}); make it anew: sm121 golden {checkpoint} -o FILE"
        )


def refuse_other_rounding(file: OracleFile, served: Rounding) -> None:
    """Only what rounds as the server does says what is right. Raises UsageError: one line that
    names both."""
    if file.rounding != served.formats:
        raise UsageError(
            f"the file of `sm121 golden` rounds {file.rounding}, the server {served.formats}; make "
            f"it anew: sm121 golden CHECKPOINT --rounding {served.formats} -o FILE"
        )


def kept_or_made(
    checkpoint: Path,
    rounding: Rounding,
    folder: Path,
    say: Callable[[int, int], None] = lambda _done, _all: None,
    *,
    anew: bool = False,
) -> OracleFile:
    """The file of a checkpoint with a rounding: that of the suite's own canary, or one in a folder
    where they are kept; it is made where there is none, and not kept where nothing can be written.
    `anew`: what is kept is not believed: anybody may have written it. Raises what `make` raises."""
    if not anew and (of_the_canary := shipped(checkpoint, rounding.formats)) is not None:
        return of_the_canary
    file = folder / f"{_key(checkpoint, rounding.formats)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_lock(file.with_suffix(".lock"))
    except OSError:
        return make(checkpoint, rounding, say=say)
    with lock:  # another run on this checkpoint makes the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.is_file() and not anew:
            with contextlib.suppress(UsageError):  # of another release, or half of one
                if (stored := load(file)).exact:  # of before, it lacks the checkpoint's mathematics
                    return stored
        partial = None if anew else file.with_suffix(".partial")
        made = make(checkpoint, rounding, kept=partial, say=say)
        with contextlib.suppress(OSError):  # a full disk: the next run makes it again
            save(made, file)
        return made


def _key(checkpoint: Path, rounding: str) -> str:
    """Of a checkpoint here, as cheap as it is sharp: a file that was changed has another time."""
    stats = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns, file.stat().st_ino)
        for file in sorted(checkpoint.iterdir())
        if file.suffix in (".safetensors", ".json")
    ]
    return digest.of([FORMAT, str(checkpoint.resolve()), stats, _prompts_digest(), rounding])
