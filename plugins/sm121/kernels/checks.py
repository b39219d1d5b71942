"""One operation of a provider on one problem: what is wrong with what it did."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from sm121.core.unmet import Fact, of
from sm121.core.verdict import Inapplicable, NotRun
from sm121.kernels import poison
from sm121.kernels.problems import Problem
from sm121.kernels.protocol import ACTIVATIONS, Declaration, declaration, prepared

# What a provider may say "not these strides" with. Anything else is an error of its own.
_REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError)

_WARM_UPS = 3

#: Runs of an operation with the same inputs, where more than the two with poison. FlashInfer's own
#: tests of XQA on a GB10 had 78 to 83 % of the elements in tolerance, in some runs of one build
#: (flashinfer issue 3658). A kernel that is wrong in one run of p shows in 1 - (1 - 1/p)^16 of the
#: cases: 97 % for one in five, 64 % for one in sixteen.
RUNS = {"decode_attention": 16, "decode_attention_fp8": 16}

Recorder = Callable[[Callable[[], Any]], "tuple[Callable[[], None], Any]"]
"""Records a call; gives its replay, and the output that a replay writes."""


class DeviceFault(RuntimeError):
    """The device reported an error; where its context is broken, whatever comes next fails too."""


def check(provider: Any, problem: Problem) -> list[Fact]:
    """Run an operation twice, on fresh inputs and into differently poisoned memory, and then as
    often as `RUNS` has it; a line for each thing that is wrong: values, shapes, poison that was
    left, inputs that were changed, bits that differ although the provider declares them the same.
    Raises NotRun: the provider lacks the operation; Inapplicable: it refuses the input aloud, so
    that it never serves it wrong."""
    declared, operation = _operation_of(provider, problem)
    if problem.block is not None and problem.block not in declared.block_sizes:
        raise Inapplicable(
            f"provider {declared.name} has pages of {declared.block_sizes} tokens only"
        )
    wrong: list[Fact] = []
    outputs: list[Any] = []
    for kind in poison.KINDS:
        arguments, keywords = _on(problem.arguments, declared), _on(problem.keywords, declared)
        try:
            with poison.Poisoned(kind):
                output = operation(*arguments, **keywords)
        except _REFUSALS as error:
            # A fault of the device is a RuntimeError too, and is never a polite refusal.
            if is_device_fault(error):
                raise _fault(declared, problem, error) from error
            if problem.strided:
                words = str(error).splitlines()[0]
                why = f"provider {declared.name} refuses strided inputs: {words}"
                raise Inapplicable(why) from error
            raise
        _probe(declared, problem)
        about = f"{problem.operation} into memory of {kind}"
        if not outputs or wrong or not _same_bits(outputs[0], output):  # the same bits are as right
            wrong += of(about, problem.judge(output, declared))
        if not _same_bits((arguments, keywords), (problem.arguments, problem.keywords)):
            wrong.append(Fact("inputs as they were", "changed", problem.operation))
        outputs.append(tree_map_only(Tensor, Tensor.clone, output))
    repeats = problem.operation in declared.deterministic
    if repeats and not wrong and not _same_bits(outputs[0], outputs[1]):
        differ = "two runs differ; take it out of `deterministic` or make it so"
        wrong.append(Fact("deterministic, as declared", differ, problem.operation))
    return wrong or _wrong_again(declared, operation, problem, outputs[0])


def _wrong_again(
    declared: Declaration, operation: Callable[..., Any], problem: Problem, first: Any
) -> list[Fact]:
    """Run an operation again and again on one set of inputs, and compare with its first output.

    Args:
        declared: what the provider says of itself.
        operation: of the provider.
        problem: whose first two outputs were right.
        first: output of the first run.

    Returns:
        What is wrong with the first output beyond tolerance, and how many runs gave other bits if
        the provider declares the same each time.
    """
    runs = RUNS.get(problem.operation, len(poison.KINDS))
    arguments, keywords = _on(problem.arguments, declared), _on(problem.keywords, declared)
    beyond: list[Fact] = []
    different: list[int] = []
    for number in range(len(poison.KINDS) + 1, runs + 1):
        with poison.Poisoned(poison.NAN):
            output = operation(*arguments, **keywords)
        _probe(declared, problem)
        if _same_bits(first, output):
            continue
        different.append(number)
        if not beyond:
            about = f"{problem.operation}, run {number} of {runs} with the same inputs"
            beyond = of(about, problem.judge(output, declared))
    if different and problem.operation in declared.deterministic:
        observed = f"{len(different)} with other bits (the first is run {different[0]})"
        beyond.append(Fact(f"{runs} equal runs, as declared", observed, problem.operation))
    return beyond


def record_graph(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
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
    """Capture an operation on other values than the problem's, then replay it on the problem's.
    What was captured has to follow its inputs, write its whole output each time, and be bit for bit
    what an eager call gives, where the operation is declared deterministic. Raises NotRun when the
    provider does not declare the operation capturable."""
    declared, _ = _operation_of(provider, problem)
    if problem.operation not in declared.graphs:
        raise Inapplicable(
            f"provider {declared.name} does not declare {problem.operation} capturable"
        )
    arguments = list(_on(problem.arguments, declared))
    keywords = _on(problem.keywords, declared)
    read_anew = ACTIVATIONS[problem.operation]
    real = {at: arguments[at].clone() for at in read_anew}
    for at in read_anew:
        arguments[at].copy_(real[at].roll(1, -1))
    call = prepared(provider, problem.operation, *arguments, **keywords)
    try:
        replay, output = record(call)
        for at in read_anew:
            arguments[at].copy_(real[at])
        wrong = []
        for kind in poison.KINDS:
            for part in output if isinstance(output, tuple) else (output,):
                poison.fill(part, kind)
            replay()
            _probe(declared, problem)
            about = f"{problem.operation} replayed into {kind}"
            wrong += of(about, problem.judge(output, declared))
        result = tree_map_only(Tensor, Tensor.clone, output)
        same = problem.operation not in declared.deterministic or _same_bits(result, call())
    except RuntimeError as error:
        if is_device_fault(error):
            raise _fault(declared, problem, error) from error
        raise
    if not wrong and not same:
        wrong.append(Fact("replay as eager", "other bits", problem.operation))
    return wrong


def _operation_of(provider: Any, problem: Problem) -> tuple[Declaration, Callable[..., Any]]:
    declared = declaration(provider)
    operation: Callable[..., Any] | None = getattr(provider, problem.operation, None)
    if operation is None and problem.operation in declared.absent:
        raise Inapplicable(
            f"provider {declared.name} has no {problem.operation}: "
            f"{declared.absent[problem.operation]}"
        )
    if operation is None:
        raise NotRun(
            f"provider {declared.name} has no {problem.operation}; another one may "
            "(--kernel-provider)"
        )
    return declared, operation


def _on(value: Any, declared: Declaration) -> Any:
    def copied(tensor: Tensor) -> Tensor:
        storage = _whole(tensor).to(declared.device, copy=True).untyped_storage()
        copy = torch.empty(0, dtype=tensor.dtype, device=declared.device)
        return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    return tree_map_only(Tensor, copied, value)


def _whole(tensor: Tensor) -> Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage())


def _same_bits(a: Any, b: Any) -> bool:
    """Equal bit for bit, tensors with all of their storage (so also what lies between strides)."""
    mine, others = tree_leaves(a), tree_leaves(b)
    return len(mine) == len(others) and all(map(_same, mine, others))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    first, second = (
        (t.reshape(-1).view(torch.uint8) if t.is_contiguous() else _whole(t)).cpu() for t in (a, b)
    )
    return (a.shape, a.dtype) == (b.shape, b.dtype) and bool(torch.equal(first, second))


def is_device_fault(error: Exception) -> bool:
    """Whether an error says that the device, and not the call, is at fault."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def _probe(declared: Declaration, problem: Problem) -> None:
    """The device still computes: a fault of the last kernel shows here, not in the next test."""
    try:
        total = int(torch.ones(1024, device=declared.device).sum())
    except RuntimeError as error:
        raise _fault(declared, problem, error) from error
    if total != 1024:
        raise _fault(declared, problem, RuntimeError(f"1024 ones add up to {total}"))


def _fault(declared: Declaration, problem: Problem, error: Exception) -> DeviceFault:
    required = f"{declared.device} computes on after {declared.name}'s {problem.operation}"
    return DeviceFault(Fact(required, str(error).splitlines()[0]))
