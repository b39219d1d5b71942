"""Compare the packages that a kernel provider imports with those that the engine imports.

A provider imports vLLM or FlashInfer in its own process. The engine has an interpreter and an
environment of its own (``--engine-python``, a PYTHONPATH of its configuration), and may import
another build.
"""

from collections.abc import Mapping, Sequence

from sm121.core import interpreter, package_probe


def here(names: Sequence[str]) -> str:
    """Return the version and the path of each package that this process imports, as text.

    Args:
        names: Names of packages.
    """
    return _describe(package_probe.find_packages(list(names)), names)


def differences(names: Sequence[str], python: str, environment: Mapping[str, str]) -> str | None:
    """Return how the packages that the engine imports differ from those that this process imports.

    Args:
        names: Names of packages.
        python: The engine's interpreter.
        environment: The whole environment of the engine's process.

    Returns:
        One line, or None if both import the same packages.
    """
    if not names:
        return None
    imported = package_probe.find_packages(list(names))
    try:
        of_engine = interpreter.packages(python, names, environment)
    except interpreter.NoAnswer as error:
        return f"{error}, so it is not known which build the engine uses"
    different = [name for name in names if imported[name][0] != of_engine[name][0]]
    if not different:
        return None
    return (
        f"the provider's kernels are those of {_describe(imported, different)}; the engine uses "
        f"{_describe(of_engine, different)} ({python})"
    )


def _describe(builds: Mapping[str, Sequence[str | None]], names: Sequence[str]) -> str:
    """Return the version and the path of each package as text."""
    descriptions = []
    for name in names:
        place, version = builds[name]
        if place is None:
            descriptions.append(f"no {name}")
        else:
            descriptions.append(f"{name} {version or '(version not known)'} at {place}")
    return ", ".join(descriptions)
