"""Starts SGLang's server with the key of the suite, which is on no command line that others see.
``sglang.launch_server`` takes its key as an argument alone; here it comes by the environment."""

import os
import runpy
import sys

if __name__ == "__main__":  # SGLang's own processes import this file again
    sys.argv += ["--api-key", os.environ.pop("SM121_API_KEY")]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
