"""Builds of an engine that are no release, as data: ``fixtures/builds.toml``. What goes by release
goes by `identity`: the release, with the build as its local part, as in ``0.14.0+mxfp4``. It is
None where neither is known: what goes by release is then unknown, never that of the newest."""

import re
from collections.abc import Collection
from typing import Annotated

from pydantic import AfterValidator, Field

from sm121.core import data_file
from sm121.core.versions import release

_COMMIT = re.compile(r"(?<=[-+.])g?(?P<commit>[0-9a-f]{7,40})(?=$|[-.])")


class Build(data_file.DataTable):
    """One of them."""

    name: str = Field(pattern=r"^[a-z][a-z0-9]*$")
    #: What people call it.
    title: str
    engine: str
    #: The release that it is based on, where its version names none.
    release: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    #: Options of its parser that no release has.
    options: tuple[str, ...] = ()
    #: Beginnings of the commits that its versions name.
    commits: tuple[str, ...] = ()
    source: str = Field(min_length=3)

    def committed(self, version: str | None) -> bool:
        """Whether a version names one of its commits."""
        commits = [match["commit"] for match in _COMMIT.finditer(version or "")]
        return any(c.startswith(sha) or sha.startswith(c) for c in commits for sha in self.commits)


def shipped() -> tuple[Build, ...]:
    """The builds that the suite knows. Raises DataFileError: the file is wrong."""
    return data_file.load_key("builds.toml", "build", tuple[Build, ...])


def _of_a_row(name: str) -> str:
    rows = [row.name for row in shipped()]
    if name not in rows:
        raise ValueError(f"expected a build of builds.toml ({', '.join(rows)}), got {name!r}")
    return name


#: The name of one of them.
Name = Annotated[str, AfterValidator(_of_a_row)]


def named(identity: str | None) -> Build | None:
    """The build of an `identity`; None where that is a release, or nothing is known."""
    parsed = release(identity)
    return next((row for row in shipped() if parsed and parsed.local == row.name), None)


def identity(
    version: str | None, options: Collection[str] | None = None, build: str | None = None
) -> str | None:
    """What goes by release goes by this; None where neither release nor build is known.
    ``options``: of the engine's parser, None: not asked; ``build``: the one that its log shows."""
    parsed = release(version)
    if named(version) is None:
        for row in shipped():
            shows = row.name == build or {*row.options} & {*(options or ())}
            if shows or row.committed(version):
                return f"{parsed.base_version if parsed else row.release}+{row.name}"
    return version if parsed is not None else None


def may_be(identity: str | None, build: str | None) -> bool:
    """Whether an engine whose parser was not asked may be that build: nothing tells its release, or
    it is a checkout of the release that the build is based on, at a commit that is not known."""
    parsed = release(identity)
    if parsed is None:
        return True
    bases = [release(row.release) for row in shipped() if row.name == build]
    return (
        parsed.is_devrelease
        and named(identity) is None
        and any(base is not None and base.release[:2] == parsed.release[:2] for base in bases)
    )


def is_settled(version: str | None) -> bool:
    """Whether a version alone tells what the engine is, so that its parser need not be asked: it is
    a build's commit, or a release that no build is based on."""
    if named(identity(version)) is not None:
        return True
    parsed = release(version)
    if parsed is None or parsed.local or parsed.is_prerelease:
        return False
    bases = {release(row.release) for row in shipped()}
    return all(base is None or parsed.release[:2] != base.release[:2] for base in bases)
