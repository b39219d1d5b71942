"""Whether the engine's own parser accepts each value, asked before the first start."""

import contextlib
from pathlib import Path

from sm121.core import digest, errors
from sm121.core.configuration import ServerConfiguration
from sm121.engines import protocol, registry
from sm121.matrix.plan import CellPlan


def refuse_arguments(plan: CellPlan, under_test: ServerConfiguration, cache: Path) -> None:
    """Ask the engine's parser about the arguments of each value. `under_test`: its interpreter and
    variables are used; `cache`: folder of what was accepted before, which saves seconds. Raises
    UsageError: it refuses one; names axis, value, and the engine's message."""
    space = plan.space
    engine = registry.engine(space.engine)
    if not isinstance(engine, protocol.ChecksArguments):
        return
    lines = {"the baseline": plan.arguments(space.baseline)}
    for axis in space.axes:
        for value in space.values(axis):
            arguments = space.settings[axis][value].arguments
            if arguments and value != space.baseline[axis]:
                name = f"{axis}={value} ({' '.join(arguments)})"
                lines[name] = plan.arguments({**space.baseline, axis: value})
    accepted = cache / "matrix-arguments.txt"
    line = digest.of([engine.name, under_test.python, space.version, list(lines.values())])
    if space.version is not None and accepted.is_file() and line in accepted.read_text("utf-8"):
        return
    environment = dict(engine.environment(under_test, api_key=""))
    answers = engine.check_arguments(under_test.python, list(lines.values()), environment)
    for name, message in zip(lines, answers, strict=True):
        if message is not None:
            raise errors.UsageError(
                f"matrix {space.file.name}: {name}: {engine.name} "
                f"{space.version or ''} refuses it: {message}"
            )
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        with accepted.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
