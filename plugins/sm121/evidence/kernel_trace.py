"""Read a Chrome trace that the torch profiler wrote.

Format: the "Trace Event Format" of Chrome, with the categories of PyTorch's Kineto
(``kernel``, ``cpu_op``, ``user_annotation``).
"""

import codecs
import gzip
import json
import math
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sm121.core.errors import UsageError
from sm121.evidence.decode_parts import is_first_product, is_product
from sm121.evidence.kernel_profile import (
    ExpertProducts,
    HostTime,
    KernelProfile,
    Launches,
    build_profile,
)

_BLOCK_BYTES = 1 << 20
#: The maximum length of one event, in characters. Events may contain long stack traces.
_LONGEST_EVENT = 1 << 22
#: The maximum number of operators in a trace without a GPU. More would need too much memory next to
#: a server.
_MOST_OPERATORS = 5_000_000
#: The annotation of a step, with the number of requests that decode and of the tokens that the step
#: computes for them (``compute_iteration_details`` of vLLM 0.32).
_STEP = re.compile(r"^execute_\S*generation_(?P<requests>\d+)(\((sq)?(?P<tokens>\d+))?")
#: The same annotation for a step that computes a part of a prompt.
_PREFILL = re.compile(r"^execute_\S*context_[1-9]")
#: The CUDA functions that launch a kernel or a graph of kernels.
_LAUNCH = re.compile(r"^cu(da)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)")
_EVENTS_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[|^\s*\[')
_BETWEEN_EVENTS = re.compile(r"[ \t\r\n,]*")


def read_trace(path: Path) -> KernelProfile:
    """Read the kernels of a trace, or its operators if it has no kernels.

    The file is streamed: memory use grows only with the number of launches and of operators.

    Args:
        path: The trace, ``.json`` or ``.json.gz``.

    Raises:
        UsageError: The file is not such a trace, has neither kernels nor operators, or has too many
            operators.
    """
    trace = _Trace()
    try:
        for event in _events(path):
            trace.add(event)
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError, TypeError, RecursionError) as error:
        expected = f"{path}: expected a Chrome trace of the torch profiler"
        raise UsageError(f"{expected}: {error}") from error
    if trace.kernels:
        profile = build_profile("gpu", path, trace.steps or None, trace.kernels.values())
        more = {
            "step_tokens": trace.step_tokens or None,
            "prefill_steps": trace.prefill_steps,
            "host": trace.host_time(),
            "products": trace.expert_products(),
        }
        return profile.model_copy(update=more)
    if trace.operator_count > _MOST_OPERATORS:
        raise UsageError(
            f"{path}: expected at most {_MOST_OPERATORS} operators, got {trace.operator_count}; "
            "profile fewer steps"
        )
    if not trace.operators:
        raise UsageError(f"{path}: expected kernels or operators, the trace has neither")
    return build_profile("cpu", path, trace.steps or None, _own_times(trace))


class _Operator(NamedTuple):
    """A call of an operator. Times are in microseconds."""

    start: float
    took: float
    name: str


class _Thread(NamedTuple):
    """A thread of the profiled process, as the events identify it."""

    pid: Any
    tid: Any


@dataclass
class _Times:
    """The times of launches, in microseconds. A trace may have a million launches."""

    starts: "array[float]" = field(default_factory=lambda: array("d"))
    took: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, start: float, took: float) -> None:
        self.starts.append(start)
        self.took.append(took)

    def in_order(self) -> "np.ndarray[Any, Any]":
        """Return the indices of the launches, in the order of their starts."""
        return np.argsort(np.frombuffer(self.starts), kind="stable")


class _OpenOperator(NamedTuple):
    """An operator that encloses the following ones, until its end (in microseconds)."""

    end: float
    name: str


class _Trace:
    """The kernels, operators and steps of a trace."""

    def __init__(self) -> None:
        self.kernels: dict[str, Launches] = {}
        self.operators: dict[_Thread, list[_Operator]] = {}
        self.operator_count = 0
        self.steps = 0
        #: The number of steps that compute a part of a prompt.
        self.prefill_steps = 0
        #: The largest number of tokens that a step computes for one request; 0 if it is unknown.
        self.step_tokens = 0
        #: The known times of kernels.
        self.times = _Times()
        #: The times of the experts' matrix products.
        self.products = _Times()
        #: For each time in `products`: 1 if the kernel's name shows that it is the first product,
        #: else 0.
        self.first_products = bytearray()
        #: How many of the host's calls launched kernels or graphs.
        self.launches = 0

    def add(self, event: dict[str, Any]) -> None:
        if event.get("ph") != "X":
            return
        name = event.get("name")
        took = event.get("dur")
        if not isinstance(name, str) or not isinstance(took, int | float):
            return
        if not math.isfinite(took):
            took = 0.0  # the kernel ran, but its time is unknown
        took = max(took, 0.0)
        category = event.get("cat")
        if category == "kernel":
            self._add_kernel(name, took)
            self._add_time(name, took, event.get("ts"))
        elif category in ("cuda_runtime", "cuda_driver"):
            self.launches += _LAUNCH.match(name) is not None
        elif category == "cpu_op" and not self.kernels:
            self._add_operator(name, took, event)
        elif category == "user_annotation":
            self._add_annotation(name)

    def _add_kernel(self, name: str, took: float) -> None:
        self.operators.clear()  # the operators of a trace with kernels are not needed
        if name not in self.kernels:
            self.kernels[name] = Launches(name)
        self.kernels[name].add(took / 1e6)

    def _add_time(self, name: str, took: float, start: object) -> None:
        if not isinstance(start, int | float) or not math.isfinite(start):
            return
        self.times.add(start, took)
        if is_product(name):
            self.products.add(start, took)
            self.first_products.append(is_first_product(name))

    def host_time(self) -> HostTime | None:
        """Return the times of the trace; None if the kernels have no times."""
        if not self.times.starts:
            return None
        order = self.times.in_order()
        starts = np.frombuffer(self.times.starts)[order]
        #: For each kernel, the latest time at which this kernel or an earlier one ended.
        until = np.maximum.accumulate(starts + np.frombuffer(self.times.took)[order])
        wall_us = float(until[-1] - starts[0])
        idle_us = float(np.maximum(starts[1:] - until[:-1], 0.0).sum())
        return HostTime(
            wall_s=wall_us / 1e6,
            busy_s=(wall_us - idle_us) / 1e6,
            launches=self.launches or None,
        )

    def expert_products(self) -> ExpertProducts | None:
        """Return the experts' products; None if their launches are not in pairs.

        Each layer launches the first product and then the second one, often with the same kernel
        name.
        """
        count = len(self.products.starts)
        if count == 0 or count % 2:
            return None
        order = self.products.in_order()
        took = np.frombuffer(self.products.took)[order]
        named = np.frombuffer(self.first_products, dtype=np.uint8)[order]
        begin = 0
        if named[1::2].any():
            if named[::2].any():
                return None
            begin = 1  # the trace begins between the two products of a layer
        return ExpertProducts(
            pairs=count // 2,
            first_s=float(took[begin::2].sum()) / 1e6,
            second_s=float(took[1 - begin :: 2].sum()) / 1e6,
        )

    def _add_operator(self, name: str, took: float, event: dict[str, Any]) -> None:
        self.operator_count += 1
        if self.operator_count > _MOST_OPERATORS:
            return
        thread = _Thread(event.get("pid"), event.get("tid"))
        operator = _Operator(float(event.get("ts", 0.0)), float(took), name)
        self.operators.setdefault(thread, []).append(operator)

    def _add_annotation(self, name: str) -> None:
        self.prefill_steps += _PREFILL.match(name) is not None
        match = _STEP.match(name)
        if match is None or int(match["requests"]) == 0:
            return
        self.steps += 1
        tokens = math.ceil(int(match["tokens"] or 0) / int(match["requests"]))
        self.step_tokens = max(self.step_tokens, tokens)


def _own_times(trace: _Trace) -> list[Launches]:
    """Return the time of each operator, without the time of the operators that it calls."""
    own: dict[str, Launches] = {}
    for operators in trace.operators.values():
        operators.sort(key=lambda operator: (operator.start, -operator.took))
        enclosing: list[_OpenOperator] = []
        for operator in operators:
            while enclosing and enclosing[-1].end <= operator.start:
                enclosing.pop()
            seconds = operator.took / 1e6
            if enclosing:
                own[enclosing[-1].name].seconds -= seconds
            if operator.name not in own:
                own[operator.name] = Launches(operator.name)
            own[operator.name].add(seconds)
            enclosing.append(_OpenOperator(operator.start + operator.took, operator.name))
    for launches in own.values():
        launches.seconds = max(launches.seconds, 0.0)
    return list(own.values())


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace."""
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    opener = gzip.open if path.name.endswith(".gz") else open
    parser = _EventParser()
    with opener(path, "rb") as stream:
        is_last = False
        while not is_last:
            block = stream.read(_BLOCK_BYTES)
            is_last = not block
            yield from parser.feed(utf8.decode(block, final=is_last), is_last=is_last)
            if parser.ended:
                return
    raise json.JSONDecodeError("the trace ends before its last event", "", 0)


class _EventParser:
    """Parses a trace's array of events incrementally."""

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder()
        self._buffer = ""
        self._inside = False
        #: Whether the end of the array was read.
        self.ended = False

    def feed(self, text: str, *, is_last: bool) -> Iterator[dict[str, Any]]:
        """Yield the events that are complete after the next piece of text."""
        self._buffer += text
        if not self._inside and not self._enter():
            return
        buffer = self._buffer
        position = 0
        while True:
            position = _skip_separators(buffer, position)
            if buffer.startswith("]", position):
                self.ended = True
                return
            if position >= len(buffer):
                break
            try:
                event, end = self._decoder.raw_decode(buffer, position)
            except json.JSONDecodeError:
                # The next piece may contain the rest of the event.
                if is_last or len(buffer) - position > _LONGEST_EVENT:
                    raise
                break
            if isinstance(event, dict):
                yield event
            position = end
        self._buffer = buffer[position:]

    def _enter(self) -> bool:
        """Find the beginning of the array."""
        start = _EVENTS_BEGIN.search(self._buffer)
        if start is None:
            if len(self._buffer) > _LONGEST_EVENT:
                raise json.JSONDecodeError("no traceEvents", "", 0)
            return False
        self._buffer = self._buffer[start.end() :]
        self._inside = True
        return True


def _skip_separators(buffer: str, position: int) -> int:
    match = _BETWEEN_EVENTS.match(buffer, position)
    return position if match is None else match.end()
