"""Start SGLang with the API key from the environment.

SGLang itself accepts the key only as an argument.
"""

import os
import runpy
import sys

if __name__ == "__main__":  # SGLang's own processes import this file again
    sys.argv += ["--api-key", os.environ.pop("SM121_API_KEY")]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
