#!/usr/bin/env python3
"""Stands for the engine's interpreter: ``-m vllm...`` starts the stress server,
the rest is Python's.

SM121_META_PYTHON is the real one.
"""

import os
import sys
from pathlib import Path

real = os.environ["SM121_META_PYTHON"]
arguments = sys.argv[1:]
if arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]:
    arguments = [str(Path(__file__).parent / "stress_server.py"), *arguments[2:]]
os.execv(real, [real, *arguments])
