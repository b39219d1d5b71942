"""The rates of other engines on the same machine and model, as the documents have them."""

from collections.abc import Mapping

from pydantic import Field

from sm121.core import data_file
from sm121.core.data_file import DataTable
from sm121.run.verdict_file import VerdictFile


class ReferenceTarget(DataTable):
    """Machine and model of all numbers."""

    arch: str
    model: str
    description: str


class ReferenceEngine(DataTable):
    """One engine in one configuration."""

    name: str
    engine: str
    tool: str
    """The tool that measured it. Each has its own clock (docs/tables/accuracy.md)."""
    source: str = Field(min_length=3)
    configurations: tuple[str, ...] = ()
    """The configurations of the profile that it measured."""
    values: Mapping[str, float]
    """By metric, in tok/s or ms."""
    deviations: Mapping[str, float] = Field(default_factory=dict)


class References(DataTable):
    """The whole file."""

    target: ReferenceTarget
    reference: tuple[ReferenceEngine, ...] = Field(min_length=1)

    def comparable(self, run: VerdictFile) -> str | None:
        """Return why the numbers cannot be compared with those of a run.

        Args:
            run: The verdict file.

        Returns:
            The reason; None for a run of the same machine and model.
        """
        if run.arch != self.target.arch:
            return f"they are of {self.target.arch}, this run is of {run.arch or 'unknown'}"
        names = (run.engine.model, run.profile)
        if not any(self.target.model in text for text in names):
            return f"they are of {self.target.model}, this run is of {run.engine.model}"
        return None


def load() -> References:
    """Return the shipped references."""
    return data_file.load("references.toml", References)
