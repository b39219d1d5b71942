"""Keep rank 1 from entering collective operations as soon as a file exists.

This module runs in vLLM's workers on a CPU.

vLLM is started with ``--worker-extension-cls hanging_collective.Hanging``, this folder on
``PYTHONPATH``, and the path of the file in ``SM121_META_HANGS_IF``. No process ends or is stopped:
rank 1 waits for ever, and rank 0 waits for rank 1 in `all_reduce`.
"""

import os
import threading
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

_FILE = Path(os.environ["SM121_META_HANGS_IF"])
_all_reduce = CpuCommunicator.all_reduce


def _reduce_or_hang(communicator: CpuCommunicator, tensor: torch.Tensor) -> Any:
    if torch.distributed.get_rank() == 1 and _FILE.exists():
        threading.Event().wait()
    return _all_reduce(communicator, tensor)


CpuCommunicator.all_reduce = _reduce_or_hang


class Hanging:
    """An empty class. The patch is made when the worker imports this module."""
