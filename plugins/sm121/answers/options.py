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
        add: Adds an option.
    """
    add(
        "--reference",
        metavar="PATH",
        help="the checkpoint that the oracle computes from (default: the one that is served)",
    )
    add(
        "--rounding",
        metavar="LIST",
        help=(
            "what the server rounds beyond the checkpoint, as qkv=mxfp4-ceil,kv=fp8; checkpoint: "
            "nothing (default: as its kernel path shows)"
        ),
    )
    add("--golden", metavar="PATH", help="compare with the answers of a trusted run (a file)")
    add(
        "--record-golden",
        metavar="PATH",
        help="record the answers of this run as such a file",
    )
    add(
        "--exam",
        metavar="FILE",
        help=(
            "ask the questions of this file in place of the profile's exam: JSONL, each line with "
            "what counts as right"
        ),
    )
    add(
        "--scores",
        metavar="PYTHON",
        help=(
            "judge the profile's published scores with lm-evaluation-harness, by a Python that "
            "has it (lm_eval[api])"
        ),
    )
