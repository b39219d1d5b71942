"""Find requirements of installed packages that the installed versions do not meet.

The module runs in an engine's environment (``python -c``), so it imports the standard library and
`packaging` only. It reads the argument of `find_unmet` as JSON from standard input, and prints the
result as JSON.
"""

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator


def find_unmet(watched: dict[str, list[str]]) -> list[dict[str, str]]:
    """Compare requirements with installed versions.

    Args:
        watched: For each package, the names of those required packages whose versions to check.

    Returns:
        For each requirement that is not met, a dictionary with ``package``, ``version``,
        ``requirement`` and ``installed``. The list is empty if `packaging` is not installed.
    """
    if importlib.util.find_spec("packaging") is None:
        return []
    found: list[dict[str, str]] = []
    for package, names in watched.items():
        version = _version(package)
        if version is None:
            continue
        for requirement, installed in _unmet(package, names):
            found.append(
                {
                    "package": package,
                    "version": version,
                    "requirement": requirement,
                    "installed": installed,
                }
            )
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unmet(package: str, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each requirement of a package that is not met, with the installed version."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion, Version

    for line in importlib.metadata.requires(package) or []:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.name.lower() not in names:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        if installed is None:
            continue
        try:
            is_met = requirement.specifier.contains(Version(installed), prereleases=True)
        except InvalidVersion:
            continue
        if not is_met:
            yield f"{requirement.name}{requirement.specifier}", installed


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(find_unmet(json.load(sys.stdin))) + "\n")
