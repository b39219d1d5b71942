"""Short reports on the requested values of a server."""

from meta_tests.fakes.servers import configuration
from meta_tests.texts import text_file
from sm121.engines.requested import compare, different
from sm121.evidence.kernel_path import KernelPath

CORE = "(EngineCore pid=7) INFO 10-05 02:13:33 "

GB10_LOG = text_file("gb10-cutlass.log").splitlines()


def differences(configuration_, path, environment) -> list[str]:
    return different(compare(configuration_, path, environment))


def compared(path: KernelPath, *arguments: str, **environment: str):
    """Return a short report on each requested value, with only the given variables."""
    return compare(configuration(*arguments, **environment), path, environment)


def states(path: KernelPath, *arguments: str, **environment: str) -> list[str]:
    return [report.state for report in compared(path, *arguments, **environment)]
