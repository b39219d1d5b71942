"""The documented rates of other engines on the same machine with the same model."""

from collections.abc import Mapping

from pydantic import Field

from sm121.core import data_file
from sm121.core.data_file import DataTable
from sm121.run.verdict_file import VerdictFile


class ReferenceTarget(DataTable):
    """The machine and the model with which all values were measured."""

    arch: str
    model: str
    description: str


class ReferenceEngine(DataTable):
    """The values of one engine in one configuration."""

    name: str
    engine: str
    tool: str
    """The tool that measured the engine. Each tool has its own clock (docs/tables/accuracy.md)."""
    source: str = Field(min_length=3)
    configurations: tuple[str, ...] = ()
    """The profile's configurations that were measured."""
    values: Mapping[str, float]
    """The measured values by metric, in tok/s or ms."""
    deviations: Mapping[str, float] = Field(default_factory=dict)


class References(DataTable):
    """The content of references.toml."""

    target: ReferenceTarget
    reference: tuple[ReferenceEngine, ...] = Field(min_length=1)

    def comparable(self, run: VerdictFile) -> str | None:
        """Return why the values cannot be compared with a run's.

        Args:
            run: The verdict file.

        Returns:
            The reason; None if machine and model are the same.
        """
        if run.arch != self.target.arch:
            here = run.arch or "unknown"
            return f"the documented numbers are of {self.target.arch}, this run is of {here}"
        names = (run.engine.model, run.profile)
        if not any(self.target.model in text for text in names):
            here = run.engine.model
            return f"the documented numbers are of {self.target.model}, this run is of {here}"
        return None


def load() -> References:
    """Return the shipped references."""
    return data_file.load("references.toml", References)
