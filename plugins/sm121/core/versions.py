"""Ranges of releases, as data files give them."""

from typing import Annotated

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"expected versions as in '>=0.10,<0.40', got {text!r}") from error
    return text


Versions = Annotated[str, AfterValidator(_specifier)]


def release(version: str | None) -> Version | None:
    """The release that a version names. None where it names none: a commit, ``0.0.0``, or
    ``0.1.dev16581+g0a1b2c3``, as setuptools_scm calls a build of a checkout without its tags."""
    try:
        parsed = Version(version or "")
    except InvalidVersion:
        return None
    untagged = parsed.is_devrelease and parsed.release in ((0, 0), (0, 1))
    return None if untagged or not any(parsed.release) else parsed


def within(version: str | None, versions: str) -> bool:
    """Whether a version is in a range; one that names no release is in none that has a bound. A
    candidate counts as its release: by PEP 440 neither ``<0.34`` nor ``>=0.34`` has 0.34.0rc1."""
    parsed = release(version)
    if parsed is None:
        return not versions
    return Version(parsed.base_version) in SpecifierSet(versions)
