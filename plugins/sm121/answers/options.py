"""The options that set the references with which a server's answers are compared."""

from dataclasses import dataclass
from pathlib import Path

from sm121.core.model_folder import is_checkpoint
from sm121.core.option_values import checked_by, existing_file, interpreter, new_file, path_that
from sm121.core.options import option
from sm121.oracles.formats import Rounding


def _is_reference(path: Path) -> bool:
    return path.is_file() or is_checkpoint(path)


@dataclass(frozen=True)
class AnswerOptions:
    """The options about answers; a field is None if its option was not given."""

    #: A checkpoint folder, or the file of an oracle that was computed before.
    named_reference: Path | None = option(
        "--reference",
        path_that(
            _is_reference,
            "a checkpoint folder with config.json, or the file that `sm121 golden` made of one",
        ),
        metavar="PATH",
        help=(
            "checkpoint from which the oracle computes the reference answers, or a file that "
            "`sm121 golden` wrote (default: the served checkpoint)"
        ),
    )
    #: What the server rounds in addition to the checkpoint. If None, its kernel path determines
    #: this.
    rounding: Rounding | None = option(
        "--rounding",
        checked_by(Rounding.parse, wrong=("x", "qkv=no-such-format")),
        metavar="LIST",
        help=(
            "formats to which the server rounds in addition to the checkpoint's own formats, "
            "such as qkv=mxfp4-ceil,kv=fp8; the word checkpoint stands for none (default: the "
            "formats that the server's log shows)"
        ),
    )
    golden: Path | None = option(
        "--golden",
        existing_file("Record one with a build that you trust: --record-golden FILE"),
        metavar="PATH",
        help=(
            "golden file (recorded answers of a trusted run) with which the answers are compared"
        ),
    )
    record_golden: Path | None = option(
        "--record-golden",
        new_file(),
        metavar="PATH",
        help="record the answers of this run in a golden file",
    )
    exam: Path | None = option(
        "--exam",
        existing_file("Write one with a JSON object on each line, as in docs/correctness.md"),
        metavar="FILE",
        help=(
            "exam file to use instead of the profile's: JSONL, each line with a question and its "
            "correct answer"
        ),
    )
    #: The Python interpreter with lm-evaluation-harness.
    scores: Path | None = option(
        "--scores",
        interpreter(),
        metavar="PYTHON",
        help=(
            "run the benchmarks of the profile with lm-evaluation-harness, and compare their "
            "scores with the published scores; PYTHON is an interpreter whose environment has "
            "lm_eval[api]"
        ),
    )

    @property
    def reference(self) -> Path | None:
        """The checkpoint from which the oracle is computed; None without one."""
        if self.named_reference is None or not self.named_reference.is_dir():
            return None
        return self.named_reference

    @property
    def oracle(self) -> Path | None:
        """The file of an oracle that was computed before; None without one."""
        if self.named_reference is None or self.named_reference.is_dir():
            return None
        return self.named_reference
