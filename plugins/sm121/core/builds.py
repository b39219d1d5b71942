"""Builds of an engine that are no release, as data: ``fixtures/builds.toml``.

What goes by release (settings, capabilities, deviations, known bugs, preflight's rules) goes by
`identity`: the release, with the build as its local part, as in ``0.14.0+mxfp4``. It is None where
neither is known, and what goes by release is then unknown, never that of the newest.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache

from packaging.version import InvalidVersion, Version
from pydantic import Field

from sm121.core import data_file
from sm121.core.data_file import DataTable

_COMMIT = re.compile(r"(?:^|[.+])g?(?P<commit>[0-9a-f]{7,40})(?=$|[.])")


class Build(DataTable):
    """One of them."""

    name: str = Field(pattern=r"^[a-z][a-z0-9]*$")
    #: What people call it.
    title: str
    engine: str
    #: The release that it is based on.
    release: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    #: Options of its parser that no release has.
    options: tuple[str, ...] = Field(min_length=1)
    #: Beginnings of the commits that its versions name.
    commits: tuple[str, ...] = ()
    source: str = Field(min_length=3)

    @property
    def identity(self) -> str:
        """The release with the build as its local part."""
        return f"{self.release}+{self.name}"

    def committed(self, version: str | None) -> bool:
        """Whether a version names one of its commits."""
        local = (version or "").partition("+")[2]
        commits = [match["commit"] for match in _COMMIT.finditer(local)]
        return any(c.startswith(own) or own.startswith(c) for c in commits for own in self.commits)


class _BuildsFile(DataTable):
    build: tuple[Build, ...]


@cache
def shipped() -> tuple[Build, ...]:
    """The builds that the suite knows.

    Raises:
        DataFileError: the file is wrong.
    """
    return data_file.load("builds.toml", _BuildsFile).build


def named(identity: str | None) -> Build | None:
    """The build of an `identity`; None where that is a release, or nothing is known."""
    return next((build for build in shipped() if build.identity == identity), None)


def identity(
    version: str | None, options: Collection[str] | None = None, build: str | None = None
) -> str | None:
    """What goes by release goes by this; None where neither release nor build is known.

    Args:
        version: as the engine calls itself.
        options: of its parser; None where that was not asked.
        build: the name of the build that its log shows, if it shows one.
    """
    for row in shipped():
        if row.name == build or row.committed(version) or {*row.options} & {*(options or ())}:
            return row.identity
        if version == row.identity:
            return version
    return version if is_release(version) else None


def is_release(version: str | None) -> bool:
    """Whether a version names a release, or a candidate of one: neither a commit nor
    ``0.1.dev16581+g0a1b2c3``, as setuptools_scm calls a build of a checkout without its tags."""
    try:
        parsed = Version(version or "")
    except InvalidVersion:
        return False
    return not (parsed.is_devrelease and parsed.release in ((0, 0), (0, 1)))
