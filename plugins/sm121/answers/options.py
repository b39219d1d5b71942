"""The options that set the references with which a server's answers are compared."""

from sm121.core.options import AddOption

#: How to create the file that an option expects.
WRITTEN_BY = {
    "--golden": "Record one with a build that you trust: --record-golden FILE",
    "--exam": "Write one with a JSON object on each line, as in docs/correctness.md",
}


def add_options(add: AddOption) -> None:
    """Add the options about answers.

    Args:
        add: A function that adds an option.
    """
    add(
        "--reference",
        metavar="PATH",
        help=(
            "checkpoint from which the oracle computes, or a file of `sm121 golden` (default: "
            "the served checkpoint)"
        ),
    )
    add(
        "--rounding",
        metavar="LIST",
        help=(
            "formats to which the server rounds in addition to the checkpoint, such as "
            "qkv=mxfp4-ceil,kv=fp8; checkpoint for none (default: those that its kernel path "
            "shows)"
        ),
    )
    add(
        "--golden",
        metavar="PATH",
        help=("golden file with the answers of a trusted run, to compare with"),
    )
    add(
        "--record-golden",
        metavar="PATH",
        help="record the answers of this run in a golden file",
    )
    add(
        "--exam",
        metavar="FILE",
        help=(
            "exam file to use instead of the profile's: JSONL, each line with a question and its "
            "correct answer"
        ),
    )
    add(
        "--scores",
        metavar="PYTHON",
        help=(
            "compare with the profile's published scores; give a Python that has "
            "lm-evaluation-harness (lm_eval[api])"
        ),
    )
