"""Versions of packages, and ranges of releases in data files."""

from typing import Annotated

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator


def _specifier(text: str) -> str:
    """Return a specifier unchanged, or raise an error if it is not valid."""
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"expected versions as in '>=0.10,<0.40', got {text!r}") from error
    return text


#: A range of releases: a specifier of PEP 440, kept as its text.
Versions = Annotated[str, AfterValidator(_specifier)]


def release(version: str | None) -> Version | None:
    """Return the release in a version.

    Args:
        version: A version by PEP 440, or any text.

    Returns:
        The parsed version; None if the text contains no release. Examples without a release are a
        commit, ``0.0.0``, and ``0.1.dev16581+g0a1b2c3``, which setuptools_scm derives for a
        checkout without tags.
    """
    try:
        parsed = Version(version or "")
    except InvalidVersion:
        return None
    untagged = parsed.is_devrelease and parsed.release in ((0, 0), (0, 1))
    if untagged or not any(parsed.release):
        return None
    return parsed


def within(version: str | None, versions: str) -> bool:
    """Check whether a version is in a range.

    A release candidate counts as its release, because in PEP 440 0.34.0rc1 is in neither ``<0.34``
    nor ``>=0.34``.

    Args:
        version: A version, or any text. A text without a release is only in the range of all
            versions.
        versions: A specifier of PEP 440, for example ``>=0.10,<0.40``. If empty, all versions.
    """
    parsed = release(version)
    if parsed is None:
        return not versions
    return Version(parsed.base_version) in SpecifierSet(versions)
