"""Create logs from lists of lines, for tests."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meta_tests.folders import DATA
from sm121.evidence import kernel_path, log_lines
from sm121.evidence.log_start import LogStart


def read_lines(lines: Iterable[str], engine: str = "vllm") -> kernel_path.KernelPath:
    """Return the result of `sm121.evidence.kernel_path.read_log` for the given lines."""
    reader = kernel_path.LogReader(engine)
    for line in log_lines.join_wrapped(lines):
        reader.take(line)
    return reader.path()


def path_with(values: Mapping[str, Any]) -> kernel_path.KernelPath:
    """Return a path with the given values of its fields, and of the fields of `LogStart`."""
    beside = {name: value for name, value in values.items() if name in LogStart.model_fields}
    own = {name: value for name, value in values.items() if name not in beside}
    return kernel_path.KernelPath.model_validate({**own, "log": beside})


def stated(path: kernel_path.KernelPath) -> dict[str, object]:
    """Return the fields of a path that are not null and not empty, without the evidence."""
    every = path.model_dump(exclude={"evidence"})
    return {name: value for name, value in every.items() if value not in (None, [], {})}


def lines_of(name: str) -> dict[str, Any]:
    """Return the lines of the logs in ``data/NAME``, and the values that they prove."""
    return tomllib.loads((DATA / name).read_text("utf-8"))


def proofs(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, object]]:
    """Return each line that proves a value, with the field and the value."""
    return [(entry["line"], entry["field"], entry["value"]) for entry in lines]
