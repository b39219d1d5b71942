"""Compute the oracle's file for a checkpoint, and cache these files."""

import contextlib
import dataclasses
import datetime
import fcntl
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sm121 import __version__
from sm121.answers import oracle_file, oracle_texts
from sm121.answers.oracle_file import (
    FORMAT,
    OracleFile,
    OraclePosition,
    Scored,
    load,
    prompts_digest,
    save,
    shipped,
)
from sm121.checkpoint.identity import identity
from sm121.core import digest
from sm121.core.errors import UsageError
from sm121.core.lock_file import open_lock
from sm121.oracles.formats import EXACT, W4A8, Rounding

if TYPE_CHECKING:
    from sm121.oracles.scores import Scores, Text

#: If the weights have at most this many bytes, the oracle computes in float64, else in float32.
_SMALL = 1 << 30
#: Number of decimals of a stored log-probability.
_DECIMALS = 7
#: The rounding that only determines the weights of a pattern (`mistake_pattern`).
_ONLY_WEIGHTS = "w4a8"


def make(
    checkpoint: Path,
    rounding: Rounding = EXACT,
    depths: Iterable[int] = (),
    device: str = "cpu",
    *,
    kept: Path | None = None,
    say: Callable[[int, int], None] = lambda _done, _all: None,
) -> OracleFile:
    """Compute the oracle's log-probabilities of a checkpoint.

    Args:
        checkpoint: The folder of the checkpoint.
        rounding: The formats in which the checkpoint is served.
        depths: Lengths in tokens of additional long prompts.
        device: A device of PyTorch.
        kept: A folder in which the state of the computation is stored, so that an interrupted
            computation can be resumed.
        say: Called with the number of completed steps and the total number of steps.

    Returns:
        The file.

    Raises:
        ValueError: The weights overflow, or `sm121.oracles.scores.score` raises ValueError.
        FileNotFoundError: Raised by `sm121.oracles.scores.score`.
    """
    begun = time.monotonic()
    fixed = dict(oracle_texts.prompts())
    _, long_ids = oracle_texts.long_prompt()
    exact_texts = _exact_texts(fixed, rounding, depths)
    texts = _texts(fixed, long_ids, rounding)
    texts += [exact_text.text for exact_text in exact_texts.values()]
    scored = _score(checkpoint, texts, device, kept, say)
    results = _results(iter(scored), fixed, rounding, exact_texts)
    return _file(checkpoint, rounding, begun, results)


def make_prompts(
    checkpoint: Path,
    rounding: Rounding,
    names: Collection[str],
    *,
    kept: Path | None = None,
    say: Callable[[int, int], None] = lambda _done, _all: None,
) -> OracleFile:
    """Compute the oracle's log-probabilities of some fixed prompts, and of nothing else.

    Args:
        checkpoint: The folder of the checkpoint.
        rounding: The formats in which the checkpoint is served.
        names: The names of the prompts.
        kept: As in `make`.
        say: As in `make`.

    Returns:
        A file like that of `oracle_file.only_prompts`. It lacks the roundings that only determine
        the weights of small mistakes.

    Raises:
        ValueError: As in `make`.
        FileNotFoundError: As in `make`.
    """
    from sm121.oracles.scores import Text

    begun = time.monotonic()
    fixed = {name: ids for name, ids in oracle_texts.prompts() if name in names}
    ways = {way: of for way, of in _correct_roundings(rounding).items() if way != _ONLY_WEIGHTS}
    texts = []
    for served in (rounding, *ways.values()):
        texts += [Text(tuple(ids), rounding=served) for ids in fixed.values()]
    scored = iter(_score(checkpoint, texts, "cpu", kept, say))
    prompts = _take_scored(scored, fixed)
    rounded = {way: _take_scored(scored, fixed) for way in ways}
    results = _Results(prompts, rounded, mistakes={}, other_roundings={}, exact={})
    return oracle_file.only_prompts(_file(checkpoint, rounding, begun, results), list(fixed))


def _score(
    checkpoint: Path,
    texts: "Sequence[Text]",
    device: str,
    kept: Path | None,
    say: Callable[[int, int], None],
) -> "list[Scores]":
    """Score texts in float64 if the weights are small, else in float32."""
    import torch

    from sm121.oracles import scores

    dtype = getattr(torch, _dtype_name(checkpoint))
    return scores.score(checkpoint, texts, dtype=dtype, device=device, cache=kept, say=say)


def _dtype_name(checkpoint: Path) -> str:
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    return "float64" if size <= _SMALL else "float32"


def _file(checkpoint: Path, rounding: Rounding, begun: float, results: "_Results") -> OracleFile:
    tokenizer = checkpoint / "tokenizer.json"
    return OracleFile(
        suite=__version__,
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        checkpoint=identity(str(checkpoint)),
        tokenizer=digest.of_files(checkpoint, [tokenizer]) if tokenizer.is_file() else None,
        prompts_digest=prompts_digest(),
        rounding=rounding.formats,
        dtype=_dtype_name(checkpoint),
        seconds=round(time.monotonic() - begun, 1),
        prompts=results.prompts,
        rounded={way: _following_of(texts) for way, texts in results.rounded.items()},
        rounded_places={way: _generated_of(texts) for way, texts in results.rounded.items()},
        mistakes=results.mistakes,
        other_roundings=results.other_roundings,
        exact=results.exact,
    )


@dataclasses.dataclass(frozen=True)
class _ExactText:
    """A text that the oracle scores without any rounding, for `OracleFile.exact`."""

    text: "Text"
    #: Whether to store ``places``; exams only need ``following``.
    with_places: bool = True


@dataclasses.dataclass(frozen=True)
class _Results:
    """The results of all texts. The fields are those of `OracleFile`."""

    prompts: dict[str, Scored]
    #: The results for each rounding of a correct engine, and each prompt.
    rounded: dict[str, dict[str, Scored]]
    mistakes: dict[str, dict[str, list[float]]]
    other_roundings: dict[str, dict[str, list[float]]]
    exact: dict[str, Scored]


def _results(
    scored: "Iterator[Scores]",
    fixed: Mapping[str, Sequence[int]],
    rounding: Rounding,
    exact_texts: "Mapping[str, _ExactText]",
) -> _Results:
    """Convert the results to the fields of the oracle's file."""
    prompts = _take_scored(scored, fixed)
    rounded = {way: _take_scored(scored, fixed) for way in _correct_roundings(rounding)}
    long_name, long_ids = oracle_texts.long_prompt()
    prompts[long_name] = _scored(next(scored), len(long_ids))
    mistakes = {}
    for name, mistake in oracle_texts.SMALL_MISTAKES.items():
        mistakes[name] = _take_following(scored, mistake.prompts)
    others = {}
    for other in rounding.with_one_mistake:
        others[other] = _take_following(scored, oracle_texts.ROUNDING_PROMPTS)
    exact = {}
    for name, exact_text in exact_texts.items():
        exact[name] = _scored(next(scored), len(exact_text.text.ids), exact_text.with_places)
    return _Results(prompts, rounded, mistakes, others, exact)


def _following_of(texts: Mapping[str, Scored]) -> dict[str, list[float]]:
    return {name: text.following for name, text in texts.items()}


def _generated_of(texts: Mapping[str, Scored]) -> dict[str, list[OraclePosition]]:
    return {name: text.generated_places for name, text in texts.items()}


def _take_scored(
    results: "Iterator[Scores]", fixed: Mapping[str, Sequence[int]]
) -> dict[str, Scored]:
    """Take one result for each prompt from an iterator of results."""
    return {name: _scored(next(results), len(ids)) for name, ids in fixed.items()}


def _take_following(results: "Iterator[Scores]", names: Iterable[str]) -> dict[str, list[float]]:
    """Take one result for each name from an iterator, and return its `Scored.following`."""
    return {name: _following(next(results)) for name in names}


def _correct_roundings(formats: Rounding) -> dict[str, Rounding]:
    """Return the roundings that a correct engine with these formats may have, with their names.

    There are several: if activations are rounded to few bits, float32 arithmetic sometimes rounds
    to another value than exact arithmetic.
    """
    roundings = {"bf16": formats.computed_in("bf16")}
    if formats == EXACT:
        roundings[_ONLY_WEIGHTS] = W4A8
    elif formats.of_activations:
        roundings["float32"] = formats.computed_in("float32")
    return roundings


def _texts(
    fixed: Mapping[str, Sequence[int]], long_ids: Sequence[int], formats: Rounding
) -> "list[Text]":
    """Return the texts that the oracle scores.

    They are the prompts in exact arithmetic and with each rounding of correct engines, the long
    prompt, the prompts of each small mistake, and the prompts with other formats.
    """
    from sm121.oracles.scores import Text

    exact = [
        Text(tuple(ids), rounding=formats, more=oracle_texts.GENERATED) for ids in fixed.values()
    ]
    texts = list(exact)
    for rounding in _correct_roundings(formats).values():
        for index, text in enumerate(exact):
            texts.append(dataclasses.replace(text, rounding=rounding, follows=index))
    long_text = Text(tuple(long_ids), rounding=formats, whole=False, more=oracle_texts.GENERATED)
    texts.append(long_text)
    for mistake in oracle_texts.SMALL_MISTAKES.values():
        for name in mistake.prompts:
            texts.append(Text(tuple(fixed[name]), change=mistake.change, rounding=formats))
    for other in formats.with_one_mistake.values():
        for name in oracle_texts.ROUNDING_PROMPTS:
            texts.append(Text(tuple(fixed[name]), rounding=other))
    return texts


def _exact_texts(
    fixed: Mapping[str, Sequence[int]], formats: Rounding, depths: Iterable[int]
) -> "dict[str, _ExactText]":
    """Return the texts of `OracleFile.exact`."""
    from sm121.oracles.scores import Text

    texts = {}
    if formats != EXACT:
        for name, ids in fixed.items():
            texts[name] = _ExactText(Text(tuple(ids)))
    for exam in oracle_texts.exams().values():
        texts[exam.name] = _ExactText(Text(exam.token_ids), with_places=False)
    for tokens in depths:
        _, ids = oracle_texts.long_prompt(tokens)
        text = Text(tuple(ids), whole=False, more=oracle_texts.GENERATED)
        texts[f"{tokens} tokens"] = _ExactText(text)
    return texts


def _scored(scores: "Scores", tokens: int, with_places: bool = True) -> Scored:
    places = []
    if with_places:
        places = _places(scores.top_ids.tolist(), scores.top.tolist())
    generated_places = []
    if scores.generated_top_ids is not None and scores.generated_top is not None:
        ids = scores.generated_top_ids.tolist()
        generated_places = _places(ids, scores.generated_top.tolist())
    return Scored(
        tokens=tokens,
        following=_following(scores),
        places=places,
        generated=list(scores.generated),
        generated_places=generated_places,
    )


def _places(ids: list[list[int]], values: list[list[float]]) -> list[OraclePosition]:
    places = []
    for place_ids, logs in zip(ids, values, strict=True):
        places.append(OraclePosition(ids=place_ids, values=[round(log, _DECIMALS) for log in logs]))
    return places


def _following(scores: "Scores") -> list[float]:
    """Return the log-probabilities of `Scored.following`, or raise ValueError if one is NaN."""
    values = scores.following.tolist()
    if not all(map(math.isfinite, values)):
        raise ValueError(
            "the oracle's result is not a number: the weights of this checkpoint overflow"
        )
    return [round(value, _DECIMALS) for value in values]


def kept_or_made(
    checkpoint: Path,
    rounding: Rounding,
    folder: Path,
    say: Callable[[int, int], None] = lambda _done, _all: None,
    *,
    anew: bool = False,
) -> OracleFile:
    """Return the file for a checkpoint: the shipped one, a cached one, or a new one.

    A new file is cached, unless the folder is not writable.

    Args:
        checkpoint: The folder of the checkpoint.
        rounding: The formats in which the checkpoint is served.
        folder: The folder of the cache.
        say: As in `make`.
        anew: Whether to ignore shipped and cached files, because any user may have written a cached
            one.

    Raises:
        ValueError: As in `make`.
        FileNotFoundError: As in `make`.
    """
    if not anew:
        of_canary = shipped(checkpoint, rounding.formats)
        if of_canary is not None:
            return of_canary

    def compute(kept: Path | None) -> OracleFile:
        return make(checkpoint, rounding, kept=kept, say=say)

    return _kept_or_computed(_path(checkpoint, rounding, folder), _read_kept, compute, anew=anew)


def kept_prompts(
    checkpoint: Path, rounding: Rounding, folder: Path, names: Collection[str]
) -> OracleFile | None:
    """Return the log-probabilities of some prompts from a shipped or a cached file.

    Args:
        checkpoint: The folder of the checkpoint.
        rounding: The formats in which the checkpoint is served.
        folder: The folder of the cache.
        names: The names of the prompts.

    Returns:
        The file; None if the log-probabilities must be computed.
    """
    whole = shipped(checkpoint, rounding.formats)
    if whole is None:
        whole = _read_kept(_path(checkpoint, rounding, folder))
    if whole is not None:
        return oracle_file.only_prompts(whole, names)
    return _load_kept(_path(checkpoint, rounding, folder, names))


def prompts_kept_or_made(
    checkpoint: Path,
    rounding: Rounding,
    folder: Path,
    names: Collection[str],
    say: Callable[[int, int], None] = lambda _done, _all: None,
    *,
    anew: bool = False,
) -> OracleFile:
    """Return the log-probabilities of some prompts, like `kept_or_made`.

    Args:
        checkpoint: As in `kept_or_made`.
        rounding: As in `kept_or_made`.
        folder: As in `kept_or_made`.
        names: The names of the prompts.
        say: As in `make`.
        anew: As in `kept_or_made`.

    Raises:
        ValueError: As in `make`.
        FileNotFoundError: As in `make`.
    """
    if not anew:
        kept = kept_prompts(checkpoint, rounding, folder, names)
        if kept is not None:
            return kept

    def compute(partial: Path | None) -> OracleFile:
        return make_prompts(checkpoint, rounding, names, kept=partial, say=say)

    path = _path(checkpoint, rounding, folder, names)
    return _kept_or_computed(path, _load_kept, compute, anew=anew)


def _kept_or_computed(
    file: Path,
    read: Callable[[Path], OracleFile | None],
    compute: Callable[[Path | None], OracleFile],
    *,
    anew: bool,
) -> OracleFile:
    """Return a cached file, or compute it and cache it.

    `compute` takes the folder for the state of an interrupted computation, or None.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(file.with_suffix(".lock"))
    except OSError:
        return compute(None)
    with lock:  # wait for other processes that make the same file
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not anew:
            stored = read(file)
            if stored is not None:
                return stored
        made = compute(None if anew else file.with_suffix(".partial"))
        # If the disk is full, the next run computes the file again.
        with contextlib.suppress(OSError):
            save(made, file)
        return made


def _path(checkpoint: Path, rounding: Rounding, folder: Path, names: Collection[str] = ()) -> Path:
    """Return the path of a cached file; with names, of the file with these prompts only."""
    return folder / f"{_key(checkpoint, rounding.formats, names)}.json"


def _load_kept(file: Path) -> OracleFile | None:
    """Return a cached file; None if it does not exist or is not usable."""
    if not file.is_file():
        return None
    try:
        return load(file)
    except UsageError:  # the file is of another release, or incomplete
        return None


def _read_kept(file: Path) -> OracleFile | None:
    """Return a cached file with the results of every text, or None."""
    stored = _load_kept(file)
    # Files of earlier releases do not contain the results without rounding.
    return stored if stored is not None and stored.exact else None


def _key(checkpoint: Path, rounding: str, names: Collection[str] = ()) -> str:
    """Return a cache key for a checkpoint, made from its path and its files' sizes and times."""
    stats = []
    for file in sorted(checkpoint.iterdir()):
        if file.suffix in (".safetensors", ".json"):
            stat = file.stat()
            stats.append((file.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    parts = [FORMAT, str(checkpoint.resolve()), stats, prompts_digest(), rounding]
    if names:
        parts.append(sorted(names))
    return digest.of_value(parts)
