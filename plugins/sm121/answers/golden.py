"""Golden files: the answers of a trusted run, with which other runs are compared.

The comparison works between two builds, and between two configurations of one build.
"""

import datetime
import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue

from sm121 import __version__
from sm121.answers import agreement
from sm121.answers.agreement import TokenAgreement
from sm121.answers.golden_comparison import GoldenComparison, differences
from sm121.answers.prompts import Prompt, PromptSet
from sm121.client.completion_json import Completion, Position, ids_of
from sm121.client.completions import Asker, Refused, Request
from sm121.core import data_file, digest
from sm121.core.data_file import DataTable
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.level_settings import GoldenBound
from sm121.core.unmet import Fact, Unmet

#: The number of likeliest tokens that are recorded per position.
TOP = 20
#: The numbers of likeliest tokens to request. They are tried in this order until the engine accepts
#: one (vLLM's default limit is 20).
_TOPS = (TOP, 5, 1)
#: The cache salt of requests for golden answers, which share the prefix cache.
_SALT = "golden"


class GoldenAnswer(DataTable):
    """The greedy answer to one prompt."""

    #: The name of the prompt.
    name: str
    prompt_ids: tuple[int, ...] | None
    text: str
    positions: tuple[Position, ...] = Field(min_length=1)


class Identity(DataTable):
    """The served model. A hash is null if the file is not on this machine."""

    served_name: str
    config_sha256: str | None = None
    #: A hash of the names and headers of the weight files. It does not depend on the weights'
    #: values.
    weights_sha256: str | None = None
    tokenizer_sha256: str | None = None
    #: A digest of parts of the weights' values (`sm121.core.digest.of_files`).
    weights_digest: str | None = None


class GoldenFile(DataTable):
    """The answers of a trusted run."""

    schema_version: Literal[1] = 1
    #: When the file was recorded, in ISO 8601.
    made: str
    #: The version of the suite.
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
    #: Why these answers are not trusted. It is null if the recording run was completed, and all its
    #: other checks of answers passed.
    doubt: str | None = "the end of the run that recorded it is unknown"


def load(path: Path) -> GoldenFile:
    """Read a golden file.

    Args:
        path: The path.

    Raises:
        UsageError: The file is not a golden file.
    """
    return data_file.read_json(path, GoldenFile, f"--golden {path}", "--record-golden")


def save(golden: GoldenFile, path: Path) -> None:
    """Write a golden file atomically.

    Args:
        golden: The content.
        path: The path.
    """
    write_text(golden.model_dump_json(indent=1) + "\n", path)


def conclude(path: Path, doubt: str | None) -> None:
    """Store in a golden file whether the answers of its run are trusted.

    This is called at the end of the run that recorded the file.

    Args:
        path: The file.
        doubt: See `GoldenFile.doubt`.
    """
    save(load(path).model_copy(update={"doubt": doubt}), path)


def save_repeated(first: GoldenFile, second: GoldenFile, path: Path) -> None:
    """Write the first of two recordings of the same server if both are equal.

    Args:
        first: The recording.
        second: The repetition.
        path: The file.

    Raises:
        Unmet: The second recording has other tokens or texts.
    """
    for one, other in zip(first.answers, second.answers, strict=True):
        tokens = [position.token for position in one.positions]
        repeated = [position.token for position in other.positions]
        if one.text != other.text or tokens != repeated:
            observed = f"{one.text!r} and {other.text!r}, tokens {tokens} and {repeated}"
            raise Unmet(_untrusted(one.name, "the same answer twice", observed))
    save(first, path)


def identity(served_name: str, checkpoint: Path | None) -> Identity:
    """Return the identity of a served model.

    Args:
        served_name: The name of the model on the server.
        checkpoint: The folder of its checkpoint; None if it is not on this machine.
    """
    if checkpoint is None or not checkpoint.is_dir():
        return Identity(served_name=served_name)
    weights = sorted(checkpoint.glob("*.safetensors"))
    return Identity(
        served_name=served_name,
        config_sha256=_hash_file(checkpoint / "config.json"),
        weights_sha256=_hash_headers(weights) if weights else None,
        tokenizer_sha256=_hash_file(checkpoint / "tokenizer.json"),
        weights_digest=digest.of_files(checkpoint, weights) if weights else None,
    )


def refuse_other(golden: GoldenFile, origin: str, now: Identity, prompts: PromptSet) -> None:
    """Reject a golden file that was recorded with another model, tokenizer or prompt set.

    Args:
        golden: The file.
        origin: The option and path, for the message.
        now: The served model.
        prompts: The prompt set.

    Raises:
        UsageError: The prompts differ, or a hash that is known for both models differs.
    """
    for name, recorded, served in (
        ("model's config.json", golden.model.config_sha256, now.config_sha256),
        ("model's weight files", golden.model.weights_sha256, now.weights_sha256),
        ("set of weights", golden.model.weights_digest, now.weights_digest),
        ("tokenizer", golden.model.tokenizer_sha256, now.tokenizer_sha256),
        ("prompt set", golden.prompt_set_sha256, prompts.sha256),
    ):
        if recorded is not None and served is not None and recorded != served:
            raise UsageError(
                f"{origin}: the file was recorded with another {name}: expected {served[:12]}, "
                f"got {recorded[:12]} (made {golden.made} on {golden.model.served_name})"
            )
    names = [answer.name for answer in golden.answers]
    expected = [prompt.name for prompt in prompts.prompts]
    if names != expected:
        odd = sorted(set(names) ^ set(expected)) or names
        raise UsageError(
            f"{origin}: expected one answer to each of the {len(expected)} prompts, in their "
            f"order; got {len(names)} answers; the first difference is {odd[0]!r}"
        )


def refuse_doubtful(golden: GoldenFile, origin: str) -> None:
    """Reject a golden file whose answers are not trusted.

    Args:
        golden: The file.
        origin: The option and path, for the message.

    Raises:
        UsageError: The file has a `doubt`.
    """
    if golden.doubt is not None:
        raise UsageError(
            f"{origin}: expected answers of a trusted run; {golden.doubt}. Record them again: "
            "pytest tests/test_correctness.py --record-golden=PATH"
        )


def record(asker: Asker, prompts: PromptSet, **about: Any) -> GoldenFile:
    """Record the answers to a prompt set, one request at a time.

    Args:
        asker: The client of the server.
        prompts: The prompt set.
        **about: The other fields of the file.

    Raises:
        Unmet: An answer contains a number or a text that cannot be stored.
        NotRun: The engine sends no log-probabilities.
    """
    answers = []
    for prompt in prompts.prompts:
        answer = ask(asker, prompt.text, prompt.tokens)
        positions = asker.positions(answer)
        _require_storable(prompt, answer.text, positions)
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
    """Compare a server with a golden file.

    Args:
        golden: The file.
        asker: The client of the server.
        prompts: The prompt set.
        bound: The tolerance of each token.
        environment: The reproducibility record of this run.
        origin: The option and path, for the message.

    Returns:
        The comparison of each golden token with the server's answers.

    Raises:
        UsageError: The server tokenizes a prompt differently.
        NotRun: The engine sends no log-probabilities.
    """
    by_name: dict[str, Prompt] = {prompt.name: prompt for prompt in prompts.prompts}
    agreements = {}
    for expected in golden.answers:
        prompt = by_name[expected.name]
        answer = ask(asker, prompt.text, prompt.tokens)
        ids = answer.prompt_ids
        if ids is not None and expected.prompt_ids is not None and ids != expected.prompt_ids:
            raise UsageError(
                f"{origin}: the file was recorded with another tokenizer: prompt {prompt.name!r} "
                f"has {len(expected.prompt_ids)} tokens in the file and {len(ids)} on this "
                "server, or its token ids differ"
            )
        resume = continuation(asker, ids, prompt.tokens)
        agreed = agreement.compare_runs(expected.positions, asker.positions(answer), bound, resume)
        disagreement = agreed.disagreement or _other_text(expected, answer, agreed)
        agreements[expected.name] = replace(agreed, disagreement=disagreement)
    return GoldenComparison(agreements, tuple(differences(golden.environment, environment)))


def unproven(golden: GoldenFile, now: Identity) -> str | None:
    """Return which properties of the two models could not be compared.

    Args:
        golden: The file.
        now: The served model.

    Returns:
        A remark that lists the properties; None if all could be compared.
    """
    pairs = (
        ("config.json", golden.model.config_sha256, now.config_sha256),
        ("weights", golden.model.weights_sha256, now.weights_sha256),
        ("tokenizer", golden.model.tokenizer_sha256, now.tokenizer_sha256),
    )
    unknown = [name for name, recorded, served in pairs if recorded is None or served is None]
    if not unknown:
        return None
    return (
        "golden: the model may be another one, because these are not known of both models "
        f"({', '.join(unknown)}): recorded on {golden.model.served_name!r}, compared with "
        f"{now.served_name!r}"
    )


def _require_storable(prompt: Prompt, text: str, positions: Sequence[Position]) -> None:
    """Require finite numbers and a text that UTF-8 can encode."""
    values: list[float] = []
    for position in positions:
        values += [position.log_probability, *position.top.values()]
    bad = [value for value in values if not math.isfinite(value)]
    if bad:
        observed = f"{bad[0]} and {len(bad) - 1} more"
        raise Unmet(_untrusted(prompt.name, "finite log-probabilities", observed))
    if text.encode("utf-8", "replace").decode() != text:
        observed = f"half of a surrogate pair in {text!r}"
        raise Unmet(_untrusted(prompt.name, "text", observed))


def _untrusted(prompt: str, required: str, observed: str) -> Fact:
    evidence = "this run is not fit to be trusted"
    return Fact(required, observed, f"prompt {prompt!r}", evidence=evidence)


def _other_text(expected: GoldenAnswer, answer: Completion, agreed: TokenAgreement) -> Fact | None:
    """Return a fact if equal token ids have different texts.

    If the golden file identifies tokens by their texts, nothing is compared.
    """
    ids = ids_of(expected.positions)
    if ids is None or answer.ids != ids or agreed.forks or answer.text == expected.text:
        return None
    return Fact(f"the text {expected.text!r}", f"{answer.text!r}", "the same tokens")


def ask(asker: Asker, prompt: str | tuple[int, ...], tokens: int) -> Completion:
    """Request a greedy answer with the largest list of likeliest tokens that the engine allows.

    Args:
        asker: The client of the server.
        prompt: The prompt, as text or ids.
        tokens: The number of tokens.

    Raises:
        Refused: The server fails, or refuses every number of likeliest tokens.
    """
    for top in _TOPS[:-1]:
        try:
            return asker.ask(Request(prompt, tokens, top=top, salt=_SALT))
        except Refused as refusal:
            if refusal.status >= 500:
                raise
    return asker.ask(Request(prompt, tokens, top=_TOPS[-1], salt=_SALT))


def continuation(
    asker: Asker, prompt: tuple[int, ...] | None, tokens: int
) -> Callable[[tuple[int, ...]], Sequence[Position] | None]:
    """Return a function that requests the rest of an answer, as `agreement.compare_runs` needs it.

    Args:
        asker: The client of the server.
        prompt: The ids of the prompt; None if the engine sends none.
        tokens: The number of tokens of the whole answer.
    """

    def resume(prefix: tuple[int, ...]) -> Sequence[Position] | None:
        if prompt is None:
            return None
        return ask(asker, (*prompt, *prefix), tokens - len(prefix)).positions

    return resume


def _hash_file(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _hash_headers(files: Sequence[Path]) -> str:
    """Hash the names and headers of weight files. Hashing 60 GB of values would take minutes."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            size = struct.unpack("<Q", stream.read(8))[0]
            header = json.loads(stream.read(size))
        entries = sorted((name, entry) for name, entry in header.items() if name != "__metadata__")
        total.update(json.dumps([file.name, entries], sort_keys=True).encode())
    return total.hexdigest()
