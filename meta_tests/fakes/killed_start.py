"""An engine whose start is ended by a signal without a log line, as by the OOM killer.

SM121_META_SIGNAL is the number of the signal."""

import os

print("INFO 11-29 12:00:00 [api_server.py:1] vLLM API server version 0.32.0", flush=True)
os.kill(os.getpid(), int(os.environ["SM121_META_SIGNAL"]))
