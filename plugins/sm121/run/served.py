"""Which kernels of the path that was served the numerics judged, and why not the others."""

from collections import Counter
from typing import get_args

from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_settings import KernelPathRequirement
from sm121.core.verdict import Verdict
from sm121.engines import requested
from sm121.evidence.kernel_path import KernelPath
from sm121.kernels import serving
from sm121.kernels.protocol import Operation
from sm121.kernels.serving import Choice
from sm121.run.engine_report import ServedKernel
from sm121.run.verdict_file import TestReport, VerdictFile

_JUDGED = (Verdict.PASS, Verdict.FAIL)


def expected(
    required: KernelPathRequirement, configuration: ServerConfiguration | None
) -> KernelPath:
    """The path that a configuration will have, before its server has shown it. `configuration`:
    None where the server is attached, and nobody knows what it was asked for."""
    accepted: dict[serving.Fact, tuple[str, ...] | None] = {
        "attention": required.attention,
        "attention_decode": required.attention_decode,
        "moe": required.moe,
        "kv_cache_dtype": required.kv_cache_dtype,
        "requantised": required.requantised,
    }
    patterns = requested.patterns(configuration) if configuration is not None else {}
    return serving.expected(accepted, patterns)


def with_expected(path: KernelPath, expected: KernelPath) -> KernelPath:
    """A path with what is expected where nothing was shown yet."""
    names = get_args(serving.Fact)
    silent = {name: getattr(expected, name) for name in names if getattr(path, name) is None}
    return path.model_copy(update=silent)


def judge(file: VerdictFile, path: KernelPath) -> list[ServedKernel]:
    """Each kernel of the path, and whether a test held it against the oracle. A kernel counts as
    judged by tests of its own provider alone: that another one is right says nothing of it. `path`:
    the resolved one, with what is expected where nothing was shown."""
    kernels = []
    for operation in serving.OPERATIONS:
        tests = [
            test
            for test in file.tests
            if test.kernel is not None and test.kernel.operation == operation
        ]
        is_shown = getattr(file.engine.path, serving.component(operation)) is not None
        for choice in serving.choices(file.engine.name, file.arch or "", path, operation):
            kernels.append(_served(operation, choice, tests, shown=is_shown))
    return kernels


def _served(
    operation: Operation, choice: Choice, tests: list[TestReport], *, shown: bool
) -> ServedKernel:
    by = Counter(
        test.kernel.provider
        for test in tests
        if test.kernel is not None and test.verdict in _JUDGED
    )
    cases = by.get(choice.provider, 0) if choice.provider is not None else 0
    others = [str(name) for name in by if name is not None and name != choice.provider]
    judged: bool | None = bool(cases)
    if choice.nothing is not None:
        judged, cases, why = None, 0, choice.nothing
    elif cases:
        why = "" if shown else "as expected of the configuration: no server has shown it"
    elif choice.provider is None:
        why = choice.why
    elif others:
        why = f"{choice.provider} has the kernel that serves"
    else:
        reasons = [test.message for test in tests if test.message]
        undecided = "none of its tests decided" if tests else "none of its tests was selected"
        why = reasons[0] if reasons else undecided
    if others and judged is False:
        why += f"; judged was {', '.join(others)}, which does not serve"
    return ServedKernel(
        operation=operation,
        component=serving.component(operation),
        backend=choice.backend,
        attention_decode=choice.attention_decode,
        provider=choice.provider,
        judged=judged,
        cases=cases,
        why=why,
    )
