"""Adds FlashInfer's configuration to the environment record, read in a thread during the run."""

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from sm121.evidence import flashinfer_config
from sm121.evidence.flashinfer_config import FlashInferConfig
from sm121.run.events import EnvironmentNoted
from sm121.run.record import RunRecord

#: The name of the entry under ``unknown``.
NAME = "engine_packages.flashinfer_config"


def note_later(run: RunRecord, python: str, environment: Mapping[str, str]) -> threading.Thread:
    """Start to read the configuration, and record it when it is known.

    Args:
        run: The run. Its environment record exists.
        python: The interpreter of the engine.
        environment: The whole environment of the engine.

    Returns:
        The thread. It does not have to be joined.
    """
    _note(run, FlashInferConfig(problem="flashinfer show-config: the run ended before its answer"))

    def read() -> None:
        config = flashinfer_config.run_show_config(python, environment)
        with contextlib.suppress(OSError):  # the report directory is gone
            _note(run, config)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _note(run: RunRecord, config: FlashInferConfig) -> None:
    before = run.file.environment
    packages: dict[str, Any] = dict(before["engine_packages"])
    packages["flashinfer_config"] = config.text
    unknown = dict(before["unknown"])
    unknown.pop(NAME, None)
    if config.problem:
        unknown[NAME] = config.problem
    run.emit(EnvironmentNoted("engine_packages", packages))
    run.emit(EnvironmentNoted("unknown", unknown))
