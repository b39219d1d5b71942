"""Unreleased builds of an engine, as listed in ``fixtures/builds.toml``.

Settings that depend on the release are chosen by the identity of an engine. The identity is the
release, with the name of the build as the local version, for example ``0.14.0+mxfp4``. If neither
the release nor the build is known, the identity is None, and the engine never counts as the newest
release.
"""

import re
from collections.abc import Collection
from typing import Annotated

from packaging.version import Version
from pydantic import AfterValidator, Field

from sm121.core import data_file
from sm121.core.versions import release

#: The hash of a commit in a version.
_COMMIT = re.compile(r"(?<=[-+.])g?(?P<commit>[0-9a-f]{7,40})(?=$|[-.])")
#: The number of a build of llama.cpp in a version, for example ``b11434-0c1e570``.
_NUMBER = re.compile(r"b(?P<number>\d+)(?=$|-)")


class Build(data_file.DataTable):
    """One unreleased build."""

    name: str = Field(pattern=r"^[a-z][a-z0-9]*$")
    #: The name in messages.
    title: str
    engine: str
    #: The release on which the build is based. It is used if the build's version does not contain a
    #: release.
    release: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    #: Command-line options that this build has and no release has.
    options: tuple[str, ...] = ()
    #: Prefixes of the commit hashes that may be in the build's version.
    commits: tuple[str, ...] = ()
    #: The build's number, if the engine numbers its builds. Builds with larger numbers count as
    #: `release`.
    number: int | None = None
    source: str = Field(min_length=3)

    def committed(self, version: str | None) -> bool:
        """Check whether a version contains the hash of one of the build's commits.

        Args:
            version: The version. Its hash may be shorter or longer than the one in `commits`.
        """
        for match in _COMMIT.finditer(version or ""):
            commit = match["commit"]
            for sha in self.commits:
                if commit.startswith(sha) or sha.startswith(commit):
                    return True
        return False


def shipped() -> tuple[Build, ...]:
    """Return the builds that the suite has data for.

    Raises:
        DataFileError: ``builds.toml`` is invalid.
    """
    return data_file.load_key("builds.toml", "build", tuple[Build, ...])


def _require_shipped(name: str) -> str:
    """Return the name of a shipped build unchanged; raise ValueError for any other name."""
    rows = [row.name for row in shipped()]
    if name not in rows:
        raise ValueError(f"expected a build of builds.toml ({', '.join(rows)}), got {name!r}")
    return name


#: The name of a shipped build.
Name = Annotated[str, AfterValidator(_require_shipped)]


def named(identity: str | None) -> Build | None:
    """Return the build in an identity.

    Args:
        identity: The engine's identity, as the function `identity` returns it.

    Returns:
        The build; None for a release or an unknown engine.
    """
    parsed = release(identity)
    if parsed is None:
        return None
    for row in shipped():
        if parsed.local == row.name:
            return row
    return None


def identity(
    version: str | None, options: Collection[str] | None = None, build: str | None = None
) -> str | None:
    """Return the identity of an engine.

    Args:
        version: The engine's version.
        options: The engine's command-line options; None if they are unknown.
        build: The name of the build that the engine's log shows.

    Returns:
        The version itself for a release, ``RELEASE+BUILD`` for a build, or None.
    """
    parsed = release(version)
    found = _NUMBER.match(version or "")
    number = int(found["number"]) if found is not None else None
    if named(version) is None:
        for row in shipped():
            if number is not None and row.number is not None and number > row.number:
                return row.release
            has_its_option = not set(row.options).isdisjoint(options or ())
            has_its_number = number is not None and number == row.number
            if row.name == build or has_its_option or has_its_number or row.committed(version):
                base = parsed.base_version if parsed else row.release
                return f"{base}+{row.name}"
    return version if parsed is not None else None


def may_be(identity: str | None, build: str | None) -> bool:
    """Check whether an engine with unknown command-line options may be a given build.

    This is possible in two cases: if the engine's release is unknown, or if the engine is a
    checkout of the release on which the build is based, at an unknown commit.

    Args:
        identity: The engine's identity, as derived from its version alone.
        build: The name of the build. If None, only the first case is checked.
    """
    parsed = release(identity)
    if parsed is None:
        return True
    if not parsed.is_devrelease or named(identity) is not None:
        return False
    return any(row.name == build and _is_based_on(row, parsed) for row in shipped())


def is_settled(version: str | None) -> bool:
    """Check whether a version identifies the engine without its command-line options.

    This is true if the version contains the commit of a build, or if no build is based on its
    release.

    Args:
        version: The version that the engine reports; None if it is unknown.
    """
    if named(identity(version)) is not None:
        return True
    parsed = release(version)
    if parsed is None or parsed.local or parsed.is_prerelease:
        return False
    return not any(_is_based_on(row, parsed) for row in shipped())


def _is_based_on(build: Build, version: Version) -> bool:
    """Check whether a build is based on a version's minor release."""
    base = release(build.release)
    return base is not None and base.release[:2] == version.release[:2]
