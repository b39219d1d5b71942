"""A file with the oracle's log-probabilities of the fixed texts, for one checkpoint.

``sm121 golden CHECKPOINT -o FILE`` writes the file; `oracle_making` computes it. In addition to the
log-probabilities of gpt-oss, it contains the log-probabilities of correct engines that round
(`sm121.oracles.rounding`), and of models with one small mistake.
"""

from collections.abc import Collection
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import Field

from sm121.answers import oracle_texts
from sm121.checkpoint.identity import identity
from sm121.core import data_file, digest
from sm121.core.data_file import Record
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.oracles.formats import CHECKPOINT, Rounding

#: The version of the format; incremented if earlier files become unusable or results change.
FORMAT: Literal[1] = 1


class OraclePosition(Record):
    """The likeliest tokens at one position, in descending order of their probabilities."""

    ids: list[int]
    #: The log-probabilities of these tokens.
    values: list[float]


class Scored(Record):
    """One scored prompt of T tokens."""

    tokens: int
    #: The log-probability of each prompt token except the first, [T - 1]; empty for a long prompt.
    following: list[float]
    #: The likeliest next tokens after each prompt token. For a long prompt, only after the last
    #: token.
    places: list[OraclePosition]
    #: The ids of the greedily generated tokens.
    generated: list[int] = Field(default=[])
    #: The likeliest tokens at each generated position.
    generated_places: list[OraclePosition] = Field(default=[])


class OracleFile(Record):
    """The file that ``sm121 golden`` writes. Log-probabilities are in nats."""

    format: Literal[1] = FORMAT
    #: The version of the suite.
    suite: str
    #: When the file was made, in ISO 8601.
    made: str
    #: The identity of the checkpoint.
    checkpoint: str
    #: A digest of tokenizer.json; null if the checkpoint has none.
    tokenizer: str | None
    prompts_digest: str
    #: The formats with which the oracle computed (`sm121.oracles.formats`).
    rounding: str = "checkpoint"
    #: The dtype of the arithmetic.
    dtype: str
    #: The duration of the computation, in seconds.
    seconds: float
    #: The results for each prompt; the keys are the prompts' names.
    prompts: dict[str, Scored]
    #: `Scored.following` for each rounding of a correct engine, and each prompt.
    rounded: dict[str, dict[str, list[float]]]
    #: `Scored.generated_places` for each rounding of a correct engine, and each prompt, at the
    #: positions that the intact model generated.
    rounded_places: dict[str, dict[str, list[OraclePosition]]]
    #: `Scored.following` for each small mistake, and each of its prompts (`SMALL_MISTAKES`).
    mistakes: dict[str, dict[str, list[float]]] = Field(default={})
    #: `Scored.following` for each set of formats of a server with a wrong rounding, and each of
    #: `ROUNDING_PROMPTS`.
    other_roundings: dict[str, dict[str, list[float]]] = Field(default={})
    #: The results without any rounding, for the exams and long prompts of other lengths. If
    #: ``rounding`` is not ``checkpoint``, also for the prompts.
    exact: dict[str, Scored] = Field(default={})

    @property
    def unrounded(self) -> dict[str, Scored]:
        """The results without any rounding; the keys are the names of the texts."""
        if self.rounding != CHECKPOINT:
            return self.exact
        return {**self.prompts, **self.exact}


def prompts_digest() -> str:
    """Return a digest of the texts and mistakes from which a file is computed."""
    mistakes = [(name, mistake.prompts) for name, mistake in oracle_texts.SMALL_MISTAKES.items()]
    texts = [oracle_texts.prompts(), oracle_texts.long_prompt()]
    return digest.of_value([FORMAT, oracle_texts.GENERATED, *texts, mistakes])


def only_prompts(file: OracleFile, names: Collection[str]) -> OracleFile:
    """Return a file with the log-probabilities of some prompts and nothing else.

    Args:
        file: The file.
        names: The names of the prompts.
    """
    prompts = {}
    for name in names:
        prompt = file.prompts[name]
        prompts[name] = Scored(tokens=prompt.tokens, following=prompt.following, places=[])
    rounded = {}
    for way, values in file.rounded.items():
        rounded[way] = {name: values[name] for name in names}
    nothing: dict[str, object] = {
        "rounded_places": {},
        "mistakes": {},
        "other_roundings": {},
        "exact": {},
    }
    return file.model_copy(update={"prompts": prompts, "rounded": rounded, **nothing})


def save(file: OracleFile, path: Path) -> None:
    """Write a file atomically.

    Args:
        file: The content.
        path: The path.
    """
    write_text(file.model_dump_json() + "\n", path)


def load(path: Path) -> OracleFile:
    """Read a file.

    Args:
        path: The path.

    Raises:
        UsageError: The file is not such a file, or was made by a release with other prompts.
    """
    file = data_file.read_json(path, OracleFile, f"{path}", "`sm121 golden`")
    if file.prompts_digest != prompts_digest():
        raise UsageError(
            f"{path}: expected the prompts of this release, got those of release {file.suite}. "
            "Make the file again: sm121 golden CHECKPOINT -o FILE"
        )
    return file


def shipped(checkpoint: Path, formats: str = "checkpoint") -> OracleFile | None:
    """Return the oracle's file that ships with the suite for the canary in BF16.

    The file ships with the suite because computing it takes a minute.

    Args:
        checkpoint: The checkpoint.
        formats: The rounding.

    Returns:
        The file; None if there is none for this checkpoint, these formats and these prompts.
    """
    name = "oracle.json" if formats == "checkpoint" else f"oracle-{formats}.json"
    shipped_file = files("sm121.fixtures") / "canary" / name
    if not shipped_file.is_file():
        return None
    file = OracleFile.model_validate_json(shipped_file.read_text("utf-8"))
    same_checkpoint = file.checkpoint == identity(str(checkpoint))
    if not same_checkpoint or file.prompts_digest != prompts_digest():
        return None
    return file


def refuse_other(file: OracleFile, origin: Path, checkpoint: Path) -> None:
    """Reject a file that was made for another checkpoint than the served one.

    Args:
        file: The file.
        origin: The path of the file, for the message.
        checkpoint: The served checkpoint.

    Raises:
        UsageError: The checkpoints differ.
    """
    served = identity(str(checkpoint))
    if served != file.checkpoint:
        raise UsageError(
            f"--reference {origin}: it was made from another checkpoint ({file.checkpoint}) than "
            f"{checkpoint} ({served}); make it again: sm121 golden {checkpoint} -o FILE"
        )


def refuse_other_rounding(file: OracleFile, served: Rounding) -> None:
    """Reject a file with another rounding than the server's.

    Args:
        file: The file.
        served: The rounding of the server.

    Raises:
        UsageError: The roundings differ.
    """
    if file.rounding != served.formats:
        raise UsageError(
            f"the file of `sm121 golden` was computed with the formats {file.rounding}, but the "
            f"server rounds to {served.formats}; make it again: sm121 golden CHECKPOINT "
            f"--rounding {served.formats} -o FILE"
        )
