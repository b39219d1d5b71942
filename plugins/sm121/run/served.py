"""Lists which kernels of the server's path the numerics tested, and why the others were not."""

from collections import Counter
from typing import get_args

from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_settings import KernelPathRequirement
from sm121.core.verdict import Verdict
from sm121.engines import requested
from sm121.evidence.kernel_path import KernelPath
from sm121.kernels import serving
from sm121.kernels.protocol import Operation
from sm121.kernels.serving import ProviderChoice
from sm121.run.engine_report import ServedKernel
from sm121.run.verdict_file import TestReport, VerdictFile

#: The verdicts of a test that has compared a kernel with the oracle.
_JUDGED = (Verdict.PASS, Verdict.FAIL)


def expected(
    required: KernelPathRequirement, configuration: ServerConfiguration | None
) -> KernelPath:
    """Return the kernel path that is expected of a configuration before its server has run.

    Args:
        required: The kernel path that the profile requires.
        configuration: The configuration. None: an attached server with unknown arguments.
    """
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
    """Return a kernel path in which expected values fill the fields without evidence.

    Args:
        path: The kernel path that the evidence shows.
        expected: The expected kernel path.
    """
    names = get_args(serving.Fact)
    silent = {name: getattr(expected, name) for name in names if getattr(path, name) is None}
    return path.model_copy(update=silent)


def list_tested_kernels(file: VerdictFile, path: KernelPath) -> list[ServedKernel]:
    """Return each kernel of the path, and whether a test compared it with the oracle.

    Only a test with the same provider counts. A correct kernel of another provider is no evidence
    for this kernel.

    Args:
        file: The run's verdict file.
        path: The kernel path, in which expected values fill the fields without evidence.
    """
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
    operation: Operation, choice: ProviderChoice, tests: list[TestReport], *, shown: bool
) -> ServedKernel:
    """Return the row of a kernel. ``shown``: whether a server's log or metrics name its backend."""
    cases_by_provider = Counter(
        test.kernel.provider
        for test in tests
        if test.kernel is not None and test.verdict in _JUDGED
    )
    row = ServedKernel(
        operation=operation,
        component=serving.component(operation),
        backend=choice.backend,
        attention_decode=choice.attention_decode,
        provider=choice.provider,
    )
    if choice.nothing is not None:
        row.why = choice.nothing
        return row
    if choice.provider is not None:
        row.cases = cases_by_provider.get(choice.provider, 0)
    row.judged = row.cases > 0
    if row.judged:
        if not shown:
            row.why = "expected for this configuration; no server has shown it"
        return row
    others = [
        str(name) for name in cases_by_provider if name is not None and name != choice.provider
    ]
    row.why = _why_not_judged(choice, tests, others)
    return row


def _why_not_judged(choice: ProviderChoice, tests: list[TestReport], others: list[str]) -> str:
    """Return why no test compared a kernel. ``others``: the providers that were compared."""
    if choice.provider is None:
        why = choice.why
    elif others:
        why = f"{choice.provider} has the kernel that the server uses"
    else:
        why = "none of its tests passed or failed" if tests else "none of its tests was selected"
        for test in tests:
            if test.message:
                why = test.message
                break
    if others:
        why += f"; {', '.join(others)} was tested, but the server does not use it"
    return why
