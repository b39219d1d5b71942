"""Reads the options about answers: the references to compare with, and the exam."""

from dataclasses import dataclass
from pathlib import Path

from sm121.core.options import Option
from sm121.oracles.formats import Rounding
from sm121.session import given_files


@dataclass(frozen=True)
class GivenAnswers:
    """The references for answers; a field is None if its option was not given."""

    #: The checkpoint from which the oracle is computed.
    reference: Path | None = None
    #: The file of an oracle that was computed before.
    oracle: Path | None = None
    #: What the server rounds in addition to the checkpoint. If None, its kernel path determines
    #: this.
    rounding: Rounding | None = None
    golden: Path | None = None
    record_golden: Path | None = None
    exam: Path | None = None
    #: The Python interpreter with lm-evaluation-harness.
    scores: Path | None = None


def read_options(option: Option) -> GivenAnswers:
    """Read the options.

    Args:
        option: A function that returns the value of an option.

    Raises:
        UsageError: A file is missing or wrong.
    """
    return GivenAnswers(
        reference=reference_checkpoint(option),
        rounding=_rounding(option),
        oracle=oracle(option),
        golden=given_files.existing(option, "--golden"),
        record_golden=given_files.new(option, "--record-golden"),
        exam=given_files.existing(option, "--exam"),
        scores=given_files.interpreter(option, "--scores"),
    )


def oracle(option: Option) -> Path | None:
    """Return the file of an oracle that ``--reference`` names; None if it names none.

    Args:
        option: A function that returns the value of an option.
    """
    reference = given_files.path(option, "--reference")
    if reference is None or not reference.is_file():
        return None
    return reference.absolute()


def reference_checkpoint(option: Option) -> Path | None:
    """Return the checkpoint folder that ``--reference`` names; None without one, or for a file.

    Args:
        option: A function that returns the value of an option.

    Raises:
        UsageError: The value is neither a checkpoint folder nor a file.
    """
    if oracle(option) is not None:
        return None
    expected = "a checkpoint folder with config.json, or the file that `sm121 golden` made of one"
    return given_files.checked(option, "--reference", given_files.is_checkpoint, expected)


def _rounding(option: Option) -> Rounding | None:
    text = option("--rounding")
    if text is None:
        return None
    return Rounding.parse(text)
