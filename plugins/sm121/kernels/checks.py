"""Run one operation of a provider on one problem, and check the results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from sm121.core.unmet import Fact, with_subject
from sm121.core.verdict import Inapplicable, NotRun
from sm121.kernels import poison
from sm121.kernels.problem import Problem
from sm121.kernels.protocol import ACTIVATIONS, Declaration, declaration, prepared

#: A provider may refuse strided inputs by raising one of these. Other exceptions are errors.
_REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError)

#: The number of calls before a graph is recorded.
_WARM_UPS = 3

#: The number of runs with the same inputs, for operations that need more than the two runs with
#: poison. In some runs of one build, FlashInfer's own tests of XQA on a GB10 had only 78 to 83 % of
#: the elements within tolerance (flashinfer issue 3658). If a kernel is wrong in one of p runs, 16
#: runs detect it with probability 1 - (1 - 1/p)^16: 97 % for p = 5, 64 % for p = 16.
RUNS = {"decode_attention": 16, "decode_attention_fp8": 16}

#: A function that records a call. It returns the replay, and the output to which replays write.
Recorder = Callable[[Callable[[], Any]], "tuple[Callable[[], None], Any]"]


class DeviceFault(RuntimeError):
    """The device reported an error. If its context is broken, all later calls also fail."""


@dataclass(frozen=True)
class _Run:
    """One operation of a provider, on one problem."""

    declared: Declaration
    operation: Callable[..., Any]
    problem: Problem

    @property
    def is_declared_deterministic(self) -> bool:
        return self.problem.operation in self.declared.deterministic

    def copy_arguments(self) -> list[Any]:
        """Return the problem's arguments on the device, in new memory with the same strides."""
        return list(_copy_to_device(self.problem.arguments, self.declared.device))

    def copy_keywords(self) -> dict[str, Any]:
        keywords: dict[str, Any] = _copy_to_device(self.problem.keywords, self.declared.device)
        return keywords

    def call_poisoned(self, kind: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Run the operation with poisoned memory, and check that the device still works."""
        try:
            with poison.Poisoned(kind):
                output = self.operation(*arguments, **keywords)
        except _REFUSALS as error:
            # A device fault is also a RuntimeError, but never a refusal.
            if is_device_fault(error):
                raise self.fault(error) from error
            if self.problem.strided:
                words = str(error).splitlines()[0]
                why = f"provider {self.declared.name} refuses strided inputs: {words}"
                raise Inapplicable(why) from error
            raise
        self.probe()
        return output

    def probe(self) -> None:
        """Check that the device works, so that a fault is attributed to the right kernel."""
        try:
            total = int(torch.ones(1024, device=self.declared.device).sum())
        except RuntimeError as error:
            raise self.fault(error) from error
        if total != 1024:
            raise self.fault(RuntimeError(f"1024 ones add up to {total}"))

    def fault(self, error: Exception) -> DeviceFault:
        operation = f"{self.declared.name}'s {self.problem.operation}"
        required = f"{self.declared.device} to compute after {operation}"
        return DeviceFault(Fact(required, str(error).splitlines()[0]))


def check(provider: Any, problem: Problem) -> list[Fact]:
    """Run an operation twice with differently poisoned memory, then repeat it (see `RUNS`).

    Each of the first two runs has fresh copies of the inputs.

    Args:
        provider: The kernel provider.
        problem: The problem.

    Returns:
        One fact for each fault: wrong values or shapes, unwritten memory, modified inputs, or
        differing results of an operation that is declared deterministic.

    Raises:
        NotRun: The provider lacks the operation.
        Inapplicable: The provider refuses the input with an error.
        DeviceFault: The device reported an error.
    """
    run = _prepare_run(provider, problem)
    if problem.block is not None and problem.block not in run.declared.block_sizes:
        raise Inapplicable(
            f"provider {run.declared.name} has pages of {run.declared.block_sizes} tokens only"
        )
    wrong: list[Fact] = []
    outputs: list[Any] = []
    for kind in poison.KINDS:
        arguments = run.copy_arguments()
        keywords = run.copy_keywords()
        output = run.call_poisoned(kind, arguments, keywords)
        # An output that is bitwise equal to a correct one need not be judged again.
        if not outputs or wrong or not _same_bits(outputs[0], output):
            about = f"{problem.operation} into memory of {kind}"
            wrong += with_subject(about, problem.judge(output, run.declared))
        if not _same_bits((arguments, keywords), (list(problem.arguments), problem.keywords)):
            wrong.append(Fact("unchanged inputs", "changed ones", problem.operation))
        outputs.append(tree_map_only(Tensor, Tensor.clone, output))
    if wrong:
        return wrong
    if run.is_declared_deterministic and not _same_bits(outputs[0], outputs[1]):
        differ = "two runs that differ; remove it from `deterministic`, or make it deterministic"
        required = "equal bits in each run, because it is declared deterministic"
        return [Fact(required, differ, problem.operation)]
    return _check_repeats(run, outputs[0])


def _check_repeats(run: _Run, first: Any) -> list[Fact]:
    """Run an operation repeatedly on one set of inputs, and compare the outputs with the first.

    Args:
        run: The operation and the problem, whose first two outputs were correct.
        first: The output of the first run.

    Returns:
        The faults of the first output that is wrong. If the operation is declared deterministic,
        also the number of runs whose output was not bitwise equal.
    """
    problem = run.problem
    runs = RUNS.get(problem.operation, len(poison.KINDS))
    arguments = run.copy_arguments()
    keywords = run.copy_keywords()
    wrong: list[Fact] = []
    different: list[int] = []
    for number in range(len(poison.KINDS) + 1, runs + 1):
        with poison.Poisoned(poison.NAN):
            output = run.operation(*arguments, **keywords)
        run.probe()
        if _same_bits(first, output):
            continue
        different.append(number)
        if not wrong:
            about = f"{problem.operation}, run {number} of {runs} with the same inputs"
            wrong = with_subject(about, problem.judge(output, run.declared))
    if different and run.is_declared_deterministic:
        observed = f"{len(different)} with other bits (the first is run {different[0]})"
        wrong.append(
            Fact(
                f"equal bits in {runs} runs, because it is declared deterministic",
                observed,
                problem.operation,
            )
        )
    return wrong


def record_graph(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record a call as a CUDA graph.

    Args:
        call: A call without arguments.

    Returns:
        A function that replays the graph, and the output to which it writes.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph.replay, output


def check_replay(provider: Any, problem: Problem, record: Recorder = record_graph) -> list[Fact]:
    """Capture an operation with other input values, then replay it with the problem's values.

    Each replay must use the new inputs and write its whole output. If the operation is declared
    deterministic, the output must be bitwise equal to that of an eager call.

    Args:
        provider: The kernel provider.
        problem: The problem.
        record: Records the call.

    Returns:
        One fact for each fault.

    Raises:
        NotRun: The provider lacks the operation.
        Inapplicable: The provider does not declare the operation capturable.
        DeviceFault: The device reported an error.
    """
    run = _prepare_run(provider, problem)
    if problem.operation not in run.declared.graphs:
        raise Inapplicable(
            f"provider {run.declared.name} does not list {problem.operation} in `graphs`, the "
            "operations that can be captured in a CUDA graph"
        )
    arguments = run.copy_arguments()
    read_anew = ACTIVATIONS[problem.operation]
    real = {position: arguments[position].clone() for position in read_anew}
    for position, values in real.items():
        arguments[position].copy_(values.roll(1, -1))
    call = prepared(provider, problem.operation, *arguments, **run.copy_keywords())
    try:
        replay, output = record(call)
        for position, values in real.items():
            arguments[position].copy_(values)
        wrong = []
        for kind in poison.KINDS:
            parts = output if isinstance(output, tuple) else (output,)
            for part in parts:
                poison.fill(part, kind)
            replay()
            run.probe()
            about = f"{problem.operation} replayed into {kind}"
            wrong += with_subject(about, problem.judge(output, run.declared))
        result = tree_map_only(Tensor, Tensor.clone, output)
        same = not run.is_declared_deterministic or _same_bits(result, call())
    except RuntimeError as error:
        if is_device_fault(error):
            raise run.fault(error) from error
        raise
    if not wrong and not same:
        wrong.append(
            Fact("the bits of the eager call in the replay", "other bits", problem.operation)
        )
    return wrong


def _prepare_run(provider: Any, problem: Problem) -> _Run:
    declared = declaration(provider)
    operation: Callable[..., Any] | None = getattr(provider, problem.operation, None)
    if operation is not None:
        return _Run(declared, operation, problem)
    if problem.operation in declared.absent:
        raise Inapplicable(
            f"provider {declared.name} has no {problem.operation}: "
            f"{declared.absent[problem.operation]}"
        )
    raise NotRun(
        f"provider {declared.name} has no {problem.operation}; another one may (--kernel-provider)"
    )


def _copy_to_device(value: Any, device: str) -> Any:
    """Copy all tensors of a structure, each with its whole storage."""

    def copy(tensor: Tensor) -> Tensor:
        storage = _whole_storage(tensor).to(device, copy=True).untyped_storage()
        new = torch.empty(0, dtype=tensor.dtype, device=device)
        return new.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    return tree_map_only(Tensor, copy, value)


def _whole_storage(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage, also those that the tensor does not cover."""
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage())


def _same_bits(a: Any, b: Any) -> bool:
    """Return whether two structures are bitwise equal, strided tensors with their whole storage."""
    leaves = tree_leaves(a)
    others = tree_leaves(b)
    return len(leaves) == len(others) and all(map(_is_same_leaf, leaves, others))


def _is_same_leaf(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return bool(torch.equal(_bytes_of(a), _bytes_of(b)))


def _bytes_of(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor.reshape(-1).view(torch.uint8).cpu()
    return _whole_storage(tensor).cpu()


def is_device_fault(error: Exception) -> bool:
    """Return whether an exception reports a fault of the device.

    Args:
        error: The exception that a call on the device raised.
    """
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
