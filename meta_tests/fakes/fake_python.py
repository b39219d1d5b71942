#!/usr/bin/env python3
"""A replacement for the engine's interpreter.

With ``-m vllm...``, it starts the stress server, or the file of this folder that SM121_META_SERVER
names. All other arguments are passed to the real interpreter, SM121_META_PYTHON."""

import os
import sys
from pathlib import Path

real = os.environ["SM121_META_PYTHON"]
arguments = sys.argv[1:]
if arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]:
    name = os.environ.get("SM121_META_SERVER", "stress_server.py")
    arguments = [str(Path(__file__).with_name(name)), *arguments[2:]]
os.execv(real, [real, *arguments])
