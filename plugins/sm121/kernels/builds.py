"""Whether the kernels that a provider calls are those of the build that serves. A provider imports
vLLM or FlashInfer in this process. The engine has an interpreter and an environment of its own
(``--engine-python``, a PYTHONPATH of its configuration), and may import another build."""

from collections.abc import Mapping, Sequence

from sm121.core import interpreter, package_probe


def here(names: Sequence[str]) -> str:
    return _shown(package_probe.look(list(names)), names)


def differences(names: Sequence[str], python: str, environment: Mapping[str, str]) -> str | None:
    """What the engine's interpreter imports otherwise than this process; None when it is the same.
    `python`: the engine's interpreter; `environment`: the whole environment of the engine's
    process."""
    if not names:
        return None
    imported = package_probe.look(list(names))
    try:
        engines = interpreter.packages(python, names, environment)
    except interpreter.NoAnswer as error:
        return f"{error}, so that it is not known which build the engine serves with"
    other = [name for name in names if imported[name][0] != engines[name][0]]
    if not other:
        return None
    return (
        f"the provider's kernels are those of {_shown(imported, other)}; the engine serves with "
        f"{_shown(engines, other)} ({python})"
    )


def _shown(builds: Mapping[str, Sequence[str | None]], names: Sequence[str]) -> str:
    return ", ".join(
        f"{name} {builds[name][1] or '(version not known)'} at {builds[name][0]}"
        if builds[name][0] is not None
        else f"no {name}"
        for name in names
    )
