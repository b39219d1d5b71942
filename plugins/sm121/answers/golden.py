"""Golden files: what a trusted run answered, and whether another run agrees with it. The same
comparison serves a build against an earlier one and one configuration against another."""

import datetime
import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue

from sm121 import __version__
from sm121.answers import agreement
from sm121.answers.agreement import TokenAgreement
from sm121.answers.prompts import Prompt, PromptSet
from sm121.client.completions import Asker, Completion, Position, Refused, Request, ids_of
from sm121.core import data_file, digest
from sm121.core.data_file import DataTable
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.level_settings import GoldenBound
from sm121.core.unmet import Fact, Unmet, noted, of
from sm121.core.verdict import NotRun

TOP = 20
#: An engine that refuses so many log-probabilities is asked for fewer (vLLM's default allows 20).
_TOPS = (TOP, 5, 1)


class GoldenAnswer(DataTable):
    """One prompt's greedy answer."""

    name: str
    prompt_ids: tuple[int, ...] | None
    text: str
    positions: tuple[Position, ...] = Field(min_length=1)


class Identity(DataTable):
    """What is served. A hash is null where the files are not at hand (an attached server)."""

    served_name: str
    config_sha256: str | None = None
    #: Of the weight files' names and headers: tells checkpoints apart, not their values.
    weights_sha256: str | None = None
    tokenizer_sha256: str | None = None
    #: Of pieces of the weights' values (`sm121.core.digest.of_files`).
    weights_digest: str | None = None


class GoldenFile(DataTable):
    """A trusted run's answers."""

    schema_version: Literal[1] = 1
    made: str
    suite: str
    model: Identity
    prompt_set: str
    prompt_set_sha256: str
    dtype: str
    engine: str
    engine_version: str | None
    configuration: str
    #: The reproducibility record of the run.
    environment: dict[str, JsonValue]
    answers: tuple[GoldenAnswer, ...] = Field(min_length=1)
    #: Why these answers are no trusted ones; null: the run that recorded them ended, and all of its
    #: other checks of the answers held.
    doubt: str | None = "nothing says how the run that recorded it ended"


@dataclass(frozen=True)
class GoldenComparison:
    """How a run agrees with a golden file."""

    #: Of each prompt's answer with the golden one.
    agreements: Mapping[str, TokenAgreement]
    differences: tuple[str, ...]
    """Of the two runs' environments."""

    @property
    def mean_divergence(self) -> float:
        """Mean KL divergence over all tokens that can be compared; NaN without any."""
        values = [v for a in self.agreements.values() for v in a.divergences if math.isfinite(v)]
        return math.fsum(values) / len(values) if values else math.nan

    @property
    def top1(self) -> float:
        """Share of the golden tokens that the run chooses too."""
        values = [v for a in self.agreements.values() for v in a.top1]
        return sum(values) / len(values) if values else 0.0

    @property
    def worst(self) -> tuple[str, int, float]:
        """Prompt, place and size of the largest difference of a log-probability."""
        name, agreed = max(self.agreements.items(), key=lambda item: item[1].max_abs)
        return name, agreed.worst, agreed.max_abs

    def beyond(self, bound: GoldenBound) -> list[Fact]:
        """What is above the bound; the first differing prompt comes first."""
        facts: list[Fact] = []
        wrong = [(name, a.disagreement) for name, a in self.agreements.items() if a.disagreement]
        if wrong:
            name, first = wrong[0]
            evidence = f"the first of {len(wrong)} that differ"
            facts += noted(of(f"prompt {name!r}", [first]), evidence)
        if not self.mean_divergence <= bound.mean_divergence:  # NaN is no agreement
            facts.append(
                Fact(
                    "a mean KL divergence of at most",
                    value=self.mean_divergence,
                    limit=bound.mean_divergence,
                    unit="nats",
                )
            )
        if self.top1 < bound.top1_at_least:
            share, least = 100 * self.top1, 100 * bound.top1_at_least
            facts.append(Fact("of the golden tokens at least", value=share, limit=least, unit="%"))
        return facts

    def hold(self, bound: GoldenBound, about: str = "") -> None:
        """Go on only if nothing is above the bound. Raises Unmet: something is; NotRun: tokens
        after an accepted fork could not be judged."""
        if beyond := self.beyond(bound):
            raise Unmet(*noted(of(about, beyond), self.summary()))
        if unjudged := sum(a.unjudged for a in self.agreements.values()):
            required = "token ids to ask the rest from (return_token_ids)"
            observed = f"{unjudged} tokens after a fork within the noise were not judged"
            raise NotRun(Fact(required, observed, about, evidence=self.summary()))

    def summary(self) -> str:
        """One line of figures."""
        name, token, size = self.worst
        tokens = sum(len(a.top1) for a in self.agreements.values())
        forks = sum(a.forks for a in self.agreements.values())
        return (
            f"{len(self.agreements)} prompts, {tokens} tokens: mean KL {self.mean_divergence:.3g} "
            f"nats, top-1 agreement {self.top1:.2%}, worst token {size:.3g} nats ({name}, token "
            f"{token}), {forks} accepted forks"
        )


def load(path: Path) -> GoldenFile:
    """Read a golden file. Raises UsageError: it is none."""
    return data_file.read_json(path, GoldenFile, f"--golden {path}", "--record-golden")


def save(golden: GoldenFile, path: Path) -> None:
    """Write a golden file, whole or not at all."""
    write_text(golden.model_dump_json(indent=1) + "\n", path)


def conclude(path: Path, doubt: str | None) -> None:
    """Write into a recorded file what speaks against its answers, now that the run has ended."""
    save(load(path).model_copy(update={"doubt": doubt}), path)


def save_repeated(first: GoldenFile, second: GoldenFile, path: Path) -> None:
    """Write the first of two recordings of one server. Raises AssertionError: the second has other
    tokens or texts."""
    for one, other in zip(first.answers, second.answers, strict=True):
        tokens, again = ([p.token for p in answer.positions] for answer in (one, other))
        if (one.text, tokens) != (other.text, again):
            observed = f"{one.text!r} and {other.text!r}, tokens {tokens} and {again}"
            raise Unmet(_untrusted(one.name, "the same answer twice", observed))
    save(first, path)


def identity(served_name: str, checkpoint: Path | None) -> Identity:
    """What is served, from the files of its checkpoint where they are at hand."""
    if checkpoint is None or not checkpoint.is_dir():
        return Identity(served_name=served_name)
    weights = sorted(checkpoint.glob("*.safetensors"))
    return Identity(
        served_name=served_name,
        config_sha256=_hash_of(checkpoint / "config.json"),
        weights_sha256=_hash_of_weights(weights) if weights else None,
        tokenizer_sha256=_hash_of(checkpoint / "tokenizer.json"),
        weights_digest=digest.of_files(checkpoint, weights) if weights else None,
    )


def refuse_other(golden: GoldenFile, origin: str, now: Identity, prompts: PromptSet) -> None:
    """Only the same model, prompts and tokenizer can be compared, and all of the prompts. Raises
    UsageError: one line that names what differs."""
    for name, recorded, served in (
        ("model's config.json", golden.model.config_sha256, now.config_sha256),
        ("model's weight files", golden.model.weights_sha256, now.weights_sha256),
        ("set of weights", golden.model.weights_digest, now.weights_digest),
        ("tokenizer", golden.model.tokenizer_sha256, now.tokenizer_sha256),
        ("prompt set", golden.prompt_set_sha256, prompts.sha256),
    ):
        if recorded is not None and served is not None and recorded != served:
            raise UsageError(
                f"{origin}: it was recorded with another {name}: expected {served[:12]}, it has "
                f"{recorded[:12]} (made {golden.made} on {golden.model.served_name})"
            )
    names, expected = ([item.name for item in items] for items in (golden.answers, prompts.prompts))
    if names != expected:
        odd = sorted({*names} ^ {*expected}) or names
        raise UsageError(
            f"{origin}: expected one answer to each of the {len(expected)} prompts, in their "
            f"order; it has {len(names)}, and another {odd[0]!r}"
        )


def refuse_doubtful(golden: GoldenFile, origin: str) -> None:
    """A certificate compares with a trusted run alone. Raises UsageError: the file says what speaks
    against the run that recorded it."""
    if golden.doubt is not None:
        raise UsageError(
            f"{origin}: expected answers of a trusted run; {golden.doubt}. Record them anew: "
            "pytest -m sm121 --record-golden=PATH"
        )


def record(asker: Asker, prompts: PromptSet, **about: Any) -> GoldenFile:
    """Ask the prompts one by one and keep the answers. `about`: the other fields of the file.
    Raises AssertionError: an answer is not fit to be trusted; NotRun: the engine gives no
    log-probabilities."""
    answers = []
    for prompt in prompts.prompts:
        answer = ask(asker, prompt.text, prompt.tokens)
        positions = asker.positions(answer)
        _hold_fit(prompt, answer.text, positions)
        golden = GoldenAnswer(
            name=prompt.name, prompt_ids=answer.prompt_ids, text=answer.text, positions=positions
        )
        answers.append(golden)
    return GoldenFile(
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        suite=__version__,
        prompt_set=prompts.name,
        prompt_set_sha256=prompts.sha256,
        answers=tuple(answers),
        **about,
    )


def compare(
    golden: GoldenFile,
    asker: Asker,
    prompts: PromptSet,
    bound: GoldenBound,
    environment: Mapping[str, JsonValue],
    origin: str = "--golden",
) -> GoldenComparison:
    """Ask the same again and judge each golden token under the answers. Raises UsageError: the
    server makes other tokens of a prompt; NotRun: the engine gives no log-probabilities."""
    by_name: dict[str, Prompt] = {prompt.name: prompt for prompt in prompts.prompts}
    agreements = {}
    for expected in golden.answers:
        prompt = by_name[expected.name]
        answer = ask(asker, prompt.text, prompt.tokens)
        ids = answer.prompt_ids
        if ids is not None and expected.prompt_ids is not None and ids != expected.prompt_ids:
            raise UsageError(
                f"{origin}: it was recorded with another tokenizer: prompt {prompt.name!r} was "
                f"{len(expected.prompt_ids)} tokens and is {len(ids)} here, or other ones"
            )
        judgement = agreement.judge(
            expected.positions,
            asker.positions(answer),
            bound,
            continuation(asker, ids, prompt.tokens),
        )
        wrong = judgement.disagreement or _other_text(expected, answer, judgement)
        agreements[expected.name] = replace(judgement, disagreement=wrong)
    return GoldenComparison(agreements, tuple(differences(golden.environment, environment)))


def unproven(golden: GoldenFile, now: Identity) -> str | None:
    """What could not be told of the two models for want of their files; None where it could."""
    pairs = (
        ("config.json", golden.model.config_sha256, now.config_sha256),
        ("weights", golden.model.weights_sha256, now.weights_sha256),
        ("tokenizer", golden.model.tokenizer_sha256, now.tokenizer_sha256),
    )
    unknown = [name for name, recorded, served in pairs if recorded is None or served is None]
    if not unknown:
        return None
    return (
        f"golden: not proven to be of the same model, without the files of both ("
        f"{', '.join(unknown)}): recorded on {golden.model.served_name!r}, "
        f"compared with {now.served_name!r}"
    )


def _hold_fit(prompt: Prompt, text: str, positions: Sequence[Position]) -> None:
    """What can be written to a file, and compared with anything at all."""
    values = [value for p in positions for value in (p.log_probability, *p.top.values())]
    if bad := [value for value in values if not math.isfinite(value)]:
        observed = f"{bad[0]} and {len(bad) - 1} more"
        raise Unmet(_untrusted(prompt.name, "finite log-probabilities", observed))
    if text.encode("utf-8", "replace").decode() != text:
        observed = f"half of a surrogate pair in {text!r}"
        raise Unmet(_untrusted(prompt.name, "text", observed))


def _untrusted(prompt: str, required: str, observed: str) -> Fact:
    evidence = "this run is not fit to be trusted"
    return Fact(required, observed, f"prompt {prompt!r}", evidence=evidence)


def _other_text(expected: GoldenAnswer, answer: Completion, judged: TokenAgreement) -> Fact | None:
    """The same token ids are the same text; names that are texts themselves say nothing of it."""
    ids = ids_of(expected.positions)
    if ids is None or answer.ids != ids or judged.forks or answer.text == expected.text:
        return None
    return Fact(f"the text {expected.text!r}", f"{answer.text!r}", "the same tokens")


def ask(asker: Asker, prompt: str | tuple[int, ...], tokens: int) -> Completion:
    """A greedy answer with as many of the most likely tokens as the engine tells."""
    for top in _TOPS[:-1]:
        try:
            return asker.ask(Request(prompt, tokens, top=top, salt="golden"))
        except Refused as refusal:
            if refusal.status >= 500:
                raise
    return asker.ask(Request(prompt, tokens, top=_TOPS[-1], salt="golden"))


def continuation(
    asker: Asker, prompt: tuple[int, ...] | None, tokens: int
) -> Callable[[tuple[int, ...]], Sequence[Position] | None]:
    def resume(prefix: tuple[int, ...]) -> Sequence[Position] | None:
        if prompt is None:
            return None
        return ask(asker, (*prompt, *prefix), tokens - len(prefix)).positions

    return resume


def differences(
    before: Mapping[str, JsonValue], now: Mapping[str, JsonValue], prefix: str = ""
) -> list[str]:
    """What two reproducibility records differ in, one line each: ``key: before -> now``."""
    lines = []
    for key in sorted({*before, *now}):
        a, b = before.get(key), now.get(key)
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key}.")
        elif isinstance(a, list) and isinstance(b, list):
            # A long list says little as a whole: what came and went is what matters.
            removed, added = [x for x in a if x not in b], [x for x in b if x not in a]
            lines.append(f"{prefix}{key}: {_short(removed)} -> {_short(added)}")
        else:
            lines.append(f"{prefix}{key}: {_short(a)} -> {_short(b)}")
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _hash_of(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _hash_of_weights(files: Sequence[Path]) -> str:
    """Names, sizes and headers: reading 60 GB of values would take minutes."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            size = struct.unpack("<Q", stream.read(8))[0]
            header = json.loads(stream.read(size))
        entries = sorted((name, entry) for name, entry in header.items() if name != "__metadata__")
        total.update(json.dumps([file.name, entries], sort_keys=True).encode())
    return total.hexdigest()
