"""The numbers in ``fixtures/start-memory.toml``, from which the memory of a start is forecast."""

from sm121.core import data_file
from sm121.core.data_file import DataTable


class Overhead(DataTable):
    """The memory that an engine needs besides weights and KV cache, in GiB."""

    least: float
    usual: float
    most: float
    #: The maximum on one of several machines that serve a model together.
    most_of_several: float

    def most_with(self, machines: int) -> float:
        """Return the maximum.

        Args:
            machines: The number of machines that serve the model together.
        """
        return self.most if machines == 1 else self.most_of_several


class Gb10(DataTable):
    """The memory of a GB10, in GiB."""

    total_gib: float


class VllmDefaults(DataTable):
    """The values that vLLM uses for options that are not given."""

    utilisation: float
    batched_tokens: int
    block: int
    cpu_block: int


class StartData(DataTable):
    """The content of start-memory.toml."""

    overhead_gib: Overhead
    gb10: Gb10
    vllm: VllmDefaults


def read() -> StartData:
    """Return the numbers."""
    return data_file.load("start-memory.toml", StartData)
