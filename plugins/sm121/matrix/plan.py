"""The cells that will be tried, known before anything is started, and in which order."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from sm121.core import builds, errors, level_settings
from sm121.core.configuration import ServerConfiguration, environment_items
from sm121.core.profile import Profile
from sm121.engines import protocol, registry
from sm121.matrix import axes, covering
from sm121.matrix.axes import Cell, Space
from sm121.matrix.covering import Array, Planned

Environment = tuple[tuple[str, str], ...]
#: Arguments and variables of an engine.
Start = tuple[tuple[str, ...], Environment]


@dataclass(frozen=True)
class CellPlan:
    """What will be tried, and what each cell's engine is given."""

    profile: Profile
    settings: level_settings.MatrixPlan
    space: Space
    array: Array
    #: In the order in which they are run, the baseline first; empty with ``--matrix none``.
    cells: tuple[Planned, ...]
    #: The user's own, on top of the profile's and of the cell's.
    engine_arguments: tuple[str, ...] = ()
    engine_environment: Environment = ()

    def of_cell(self, cell: Cell) -> Start:
        """What a cell is started with, in the order of the profile's own configurations."""
        return self._start(*self.space.given(cell))

    def under_test(self, configuration: str | None = None) -> Start:
        """Arguments and variables of a configuration of the profile (default: under test)."""
        chosen = self.profile.configurations[configuration or self.profile.under_test]
        return self._start(chosen.arguments, chosen.environment)

    def _start(self, arguments: tuple[str, ...], variables: Mapping[str, str]) -> Start:
        engine = self.profile.engine
        variables_of_all = (engine.environment, variables, dict(self.engine_environment))
        everything = (*engine.arguments, *arguments, *self.engine_arguments)
        return everything, environment_items(*variables_of_all)

    @property
    def command(self) -> str:
        """The command that runs these cells."""
        words = ["pytest tests/test_matrix.py", f"--matrix {self.array.strength}"]
        if self.space.engine != "vllm":
            words.append(f"--engine {self.space.engine}")
        return " ".join(words)


def settings_of(profile: Profile) -> level_settings.MatrixPlan:
    """The profile's ``[matrix]``. Raises UsageError: it has none."""
    if profile.matrix is None:
        raise errors.UsageError(f"profile {profile.name} has no [matrix]")
    return profile.matrix


def space_of(
    profile: Profile,
    axes_file: str | None = None,
    engine: str | None = None,
    version: str | None = None,
    options: Collection[str] | None = None,
) -> Space:
    """Return the axes of a profile, as an engine has them.

    Args:
        profile: Its ``[matrix]`` names the axes, and those that it leaves out.
        axes_file: The axes in place of the profile's; none of them is left out.
        engine: Default: the profile's.
        version: As the engine calls itself, or as `Space` takes it.
        options: As `Space` takes it.

    Raises:
        UsageError: The profile has no axes, or they contradict themselves.
    """
    settings = settings_of(profile)
    file = axes.load(axes_file or settings.axes)
    if axes_file is None and settings.left_out:
        file = axes.leave_out(file, settings.left_out)
    identity = builds.identity(version, options) or version
    return Space(file, engine or profile.engine.name, identity, options)


def make_plan(
    profile: Profile,
    space: Space | None = None,
    *,
    strength: str | None = None,
    engine_arguments: tuple[str, ...] = (),
    engine_environment: Environment = (),
) -> CellPlan:
    """Choose the cells of a profile's matrix. `space`: the axes (default: the profile's);
    `strength`: as ``--matrix`` takes it (default: the profile's, or the number of axes). Raises
    UsageError: the profile has no ``[matrix]``, or what was asked for is none of it."""
    settings = settings_of(profile)
    space = space or space_of(profile)
    parsed = covering.parse_strength(
        strength or str(min(settings.strength, max(1, len(space.axes))))
    )
    array = covering.build(space, parsed)
    every = ordered(space, array.cells, lambda planned: str(space.given(planned.cell)))
    cells = tuple(every) if parsed != "none" else ()
    return CellPlan(profile, settings, space, array, cells, engine_arguments, engine_environment)


def ordered(
    space: Space, cells: Sequence[Planned], key: Callable[[Planned], Hashable]
) -> list[Planned]:
    """The baseline first, for it is what all others are compared with; cells of one start-up
    together; then the start-up next that shares most values with the last, so that what the engine
    keeps (compiled kernels, the page cache) is used while it is there. Ties: the plan's order."""
    groups: dict[Hashable, list[Planned]] = {}
    for planned in cells:
        groups.setdefault(key(planned), []).append(planned)
    waiting = list(groups.values())
    result: list[Planned] = []
    while waiting:
        last = result[-1].cell if result else space.baseline
        nearest = min(
            range(len(waiting)),
            key=lambda n: (
                not result and "baseline" not in waiting[n][0].why,
                min(sum(p.cell[a] != last[a] for a in space.axes) for p in waiting[n]),
                n,
            ),
        )
        result += waiting.pop(nearest)
    return result


def refuse_arguments(plan: CellPlan, under_test: ServerConfiguration) -> None:
    """Ask the engine's parser about the arguments of each value. `under_test`: its interpreter and
    variables are used. Raises UsageError: it refuses one; names axis, value, and the engine's
    message."""
    space = plan.space
    engine = registry.engine(space.engine)
    if not isinstance(engine, protocol.ChecksArguments):
        return
    lines = {"the baseline": plan.of_cell(space.baseline)[0]}
    for axis in space.axes:
        for value in space.values(axis):
            arguments = space.settings[axis][value].arguments
            if arguments and value != space.baseline[axis]:
                name = f"{axis}={value} ({' '.join(arguments)})"
                lines[name] = plan.of_cell({**space.baseline, axis: value})[0]
    environment = dict(engine.environment(under_test, api_key=""))
    answers = engine.check_arguments(under_test.python, list(lines.values()), environment)
    for name, message in zip(lines, answers, strict=True):
        if message is not None:
            raise errors.UsageError(
                f"matrix {space.file.name}: {name}: {engine.name} "
                f"{space.version or ''} refuses it: {message}"
            )
