"""The tables ``[plans]`` of a profile: which tests a plan runs, and with which settings."""

import fnmatch
from collections.abc import Collection
from typing import Annotated, get_args

from pydantic import Field, model_validator

from sm121.core.data_file import DataTable
from sm121.core.measuring_settings import Count
from sm121.core.profile_fields import Level


class PlanRow(DataTable):
    """The part of a profile that ``--plan NAME`` runs. A key that is not set has no effect."""

    purpose: str = Field(min_length=3)
    levels: tuple[Level, ...] = Field(default=get_args(Level), min_length=1)
    #: For each level that runs in part, its tests: markers, or names (``*`` stands for any text).
    tests: dict[Level, tuple[Annotated[str, Field(min_length=1)], ...]] = Field(default={})
    #: The depths of ``[performance]`` that are measured; all if None.
    depths: tuple[int, ...] | None = Field(default=None, min_length=1)
    #: The answer lengths of ``[performance]`` that are measured; all if None.
    generated_tokens: tuple[int, ...] | None = Field(default=None, min_length=1)
    #: The numbers of streams of ``[performance.measuring]`` that are measured; all if None.
    concurrency: tuple[int, ...] | None = None
    #: The number of rounds of each cell.
    rounds: Count | None = None
    #: The names of the fixed prompts whose log-probabilities are compared with the oracle's; all if
    #: None. The oracle computes these prompts beside other tests.
    oracle_prompts: tuple[str, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _tests_of_its_levels(self) -> "PlanRow":
        for level in self.tests:
            if level not in self.levels:
                raise ValueError(f"tests.{level}: expected a level of its levels")
        return self

    def asks(self, level: str, name: str, markers: Collection[str]) -> bool:
        """Check whether the plan runs a test.

        Args:
            level: The test's level.
            name: The test's name without parameters.
            markers: The names of the test's markers.
        """
        if level not in self.levels:
            return False
        chosen = self.tests.get(level)
        return chosen is None or any(named(entry, name, markers) for entry in chosen)


def named(entry: str, name: str, markers: Collection[str]) -> bool:
    """Check whether an entry of a plan's ``tests`` selects a test.

    Args:
        entry: The entry: the name of a marker, or a pattern for names of tests.
        name: The test's name without parameters.
        markers: The names of the test's markers.
    """
    return entry in markers or fnmatch.fnmatchcase(name, entry)
