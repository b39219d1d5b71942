"""Stands for an engine whose start is ended by a signal, without a word in its log, as the OOM
killer ends one. SM121_META_SIGNAL is the number. A tool for the meta tests."""

import os

print("INFO 11-29 12:00:00 [api_server.py:1] vLLM API server version 0.32.0", flush=True)
os.kill(os.getpid(), int(os.environ["SM121_META_SIGNAL"]))
