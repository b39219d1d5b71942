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
            "checkpoint from which the oracle computes the reference answers, or a file that "
            "`sm121 golden` wrote (default: the served checkpoint)"
        ),
    )
    add(
        "--rounding",
        metavar="LIST",
        help=(
            "formats to which the server rounds in addition to the checkpoint's own formats, "
            "such as qkv=mxfp4-ceil,kv=fp8; the word checkpoint stands for none (default: the "
            "formats that the server's log shows)"
        ),
    )
    add(
        "--golden",
        metavar="PATH",
        help=(
            "golden file (recorded answers of a trusted run) with which the answers are compared"
        ),
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
            "run the benchmarks of the profile with lm-evaluation-harness, and compare their "
            "scores with the published scores; PYTHON is an interpreter whose environment has "
            "lm_eval[api]"
        ),
    )
