"""The oracle's log-probabilities of the fixed texts on one checkpoint, as a file.

``sm121 golden CHECKPOINT -o FILE`` makes the file; `oracle_making` computes it. Beside the
log-probabilities of gpt-oss it has those of an honest engine that rounds
(`sm121.oracles.rounding`), and those of models with one small mistake.
"""

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

#: Raised if earlier files cannot be used any more, or if the oracle's results change.
FORMAT: Literal[1] = 1


class Place(Record):
    """The likeliest tokens at one position, likeliest first."""

    ids: list[int]
    #: Their log-probabilities.
    values: list[float]


class Scored(Record):
    """A prompt of T tokens."""

    tokens: int
    #: The log-probability of each token that follows in the prompt, [T - 1]; none of a long prompt.
    following: list[float]
    #: After each token of the prompt; of a long prompt after the last one.
    places: list[Place]
    #: The likeliest tokens, one after the other.
    generated: list[int] = Field(default=[])
    #: The positions at which they are chosen.
    generated_places: list[Place] = Field(default=[])


class OracleFile(Record):
    """The file of ``sm121 golden``. Log-probabilities are in nats."""

    format: Literal[1] = FORMAT
    #: The version of the suite.
    suite: str
    #: The time, in ISO 8601.
    made: str
    #: The identity of the checkpoint.
    checkpoint: str
    #: A digest of tokenizer.json; null if the checkpoint has none.
    tokenizer: str | None
    prompts_digest: str
    #: The formats that it computes with (`sm121.oracles.formats`).
    rounding: str = "checkpoint"
    #: The dtype of the arithmetic.
    dtype: str
    #: The time of the computation.
    seconds: float
    #: By the names of the prompts.
    prompts: dict[str, Scored]
    #: By the rounding of an honest engine, and by prompt: as `Scored.following`.
    rounded: dict[str, dict[str, list[float]]]
    #: By the same: the likeliest tokens at the positions that the intact model generates.
    rounded_places: dict[str, dict[str, list[Place]]]
    #: By mistake, and by each of its prompts (`SMALL_MISTAKES`): as `Scored.following`.
    mistakes: dict[str, dict[str, list[float]]] = Field(default={})
    #: By the formats of a server that rounds otherwise than it should, and by each of
    #: `ROUNDING_PROMPTS`: as `Scored.following`.
    other_roundings: dict[str, dict[str, list[float]]] = Field(default={})
    #: Without any rounding: `exams`, long prompts of other lengths, and the prompts if the file
    #: rounds.
    exact: dict[str, Scored] = Field(default={})

    @property
    def unrounded(self) -> dict[str, Scored]:
        """The checkpoint's own mathematics of each text, by its name."""
        if self.rounding != CHECKPOINT:
            return self.exact
        return {**self.prompts, **self.exact}


def prompts_digest() -> str:
    """Return a digest of the texts and mistakes that a file is made of."""
    mistakes = [(name, mistake.prompts) for name, mistake in oracle_texts.SMALL_MISTAKES.items()]
    texts = [oracle_texts.prompts(), oracle_texts.long_prompt()]
    return digest.of([FORMAT, oracle_texts.GENERATED, *texts, mistakes])


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
        UsageError: It is no such file, or of a release with other prompts.
    """
    file = data_file.read_json(path, OracleFile, f"{path}", "`sm121 golden`")
    if file.prompts_digest != prompts_digest():
        raise UsageError(
            f"{path}: made by release {file.suite} with other prompts; make it anew: "
            "sm121 golden CHECKPOINT -o FILE"
        )
    return file


def shipped(checkpoint: Path, formats: str = "checkpoint") -> OracleFile | None:
    """Return the shipped file of the canary's BF16 twin, which takes two cores a minute to make.

    Args:
        checkpoint: The checkpoint.
        formats: The rounding.

    Returns:
        The file; None if there is none of this checkpoint, these formats and the present prompts.
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
    """Refuse a file of another checkpoint than the served one.

    Args:
        file: The file.
        origin: Its path, for the message.
        checkpoint: The served checkpoint.

    Raises:
        UsageError: The checkpoints differ.
    """
    served = identity(str(checkpoint))
    if served != file.checkpoint:
        raise UsageError(
            f"--reference {origin}: it was made of another checkpoint ({file.checkpoint}) than "
            f"{checkpoint} ({served}); make it anew: sm121 golden {checkpoint} -o FILE"
        )


def refuse_other_rounding(file: OracleFile, served: Rounding) -> None:
    """Refuse a file with another rounding than the server's.

    Args:
        file: The file.
        served: The rounding of the server.

    Raises:
        UsageError: The roundings differ.
    """
    if file.rounding != served.formats:
        raise UsageError(
            f"the file of `sm121 golden` rounds {file.rounding}, the server {served.formats}; make "
            f"it anew: sm121 golden CHECKPOINT --rounding {served.formats} -o FILE"
        )
