"""Plan the cells of a run and their order, before any server is started."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from sm121.core import builds, errors, level_settings
from sm121.core.configuration import ServerConfiguration, environment_items
from sm121.core.profile import Profile
from sm121.engines import protocol, registry
from sm121.matrix import axes, covering
from sm121.matrix.axes import Cell
from sm121.matrix.covering import Array, Planned
from sm121.matrix.space import Space

#: Environment variables as sorted pairs.
Environment = tuple[tuple[str, str], ...]
#: Arguments and variables of an engine.
Start = tuple[tuple[str, ...], Environment]


@dataclass(frozen=True)
class CellPlan:
    """The cells of a run, and the arguments of their servers."""

    profile: Profile
    settings: level_settings.MatrixPlan
    space: Space
    array: Array
    #: The cells in the order of the run, the baseline first; empty with ``--matrix none``.
    cells: tuple[Planned, ...]
    #: The user's arguments, on top of the profile's and the cell's.
    engine_arguments: tuple[str, ...] = ()
    #: The user's variables, on top of the profile's and the cell's.
    engine_environment: Environment = ()

    def of_cell(self, cell: Cell) -> Start:
        """Return the arguments and variables with which a cell is started.

        Args:
            cell: The value of each axis. Its arguments and variables come after the profile's, and
                before the user's.
        """
        return self._start(*self.space.given(cell))

    def under_test(self, configuration: str | None = None) -> Start:
        """Return the arguments and variables of a configuration of the profile.

        Args:
            configuration: Its name. None: the configuration under test.
        """
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


def _settings_of(profile: Profile) -> level_settings.MatrixPlan:
    """Return the table ``[matrix]`` of a profile; raise UsageError if it has none."""
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
    """Return the axes of a profile, with the values that an engine supports.

    Args:
        profile: The profile. Its ``[matrix]`` names the axes, and those that stay at the baseline.
        axes_file: The axes instead of the profile's; the profile's ``left_out`` is then ignored.
        engine: The name of the engine. None: the profile's.
        version: The version that the engine reports, or an identity as in `Space`.
        options: As in `Space`.

    Raises:
        UsageError: The profile has no axes, or they contradict themselves.
    """
    settings = _settings_of(profile)
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
    """Choose the cells of a profile's matrix.

    Args:
        profile: The profile.
        space: The axes. None: the profile's.
        strength: The value of ``--matrix``. None: the profile's, or the number of axes; without
            axes no cells.
        engine_arguments: The user's arguments of the engine.
        engine_environment: The user's variables of the engine.

    Raises:
        UsageError: The profile has no ``[matrix]``, or the strength does not fit the axes.
    """
    settings = _settings_of(profile)
    if space is None:
        space = space_of(profile)
    default_strength = str(min(settings.strength, len(space.axes))) if space.axes else "none"
    parsed = covering.parse_strength(strength or default_strength)
    array = covering.build(space, parsed)
    cells: list[Planned] = []
    if parsed != "none":
        cells = ordered(space, array.cells, lambda planned: str(space.given(planned.cell)))
    return CellPlan(
        profile=profile,
        settings=settings,
        space=space,
        array=array,
        cells=tuple(cells),
        engine_arguments=engine_arguments,
        engine_environment=engine_environment,
    )


def ordered(
    space: Space, cells: Sequence[Planned], key: Callable[[Planned], Hashable]
) -> list[Planned]:
    """Return cells in the order of the run.

    The start of the baseline comes first, since all cells are compared with it. Each next start is
    the one that shares the most values with the last cell, so that compiled kernels and the page
    cache are reused. Ties are broken by the order of the plan.

    Args:
        space: The axes.
        cells: The cells in the order of the plan.
        key: Returns a key of a cell's start. Cells with the same key stay together.
    """
    starts: dict[Hashable, list[Planned]] = {}
    for planned in cells:
        starts.setdefault(key(planned), []).append(planned)
    waiting = list(starts.values())
    result: list[Planned] = []
    while waiting:
        if not result:
            of_baseline = [start for start in waiting if start[0].cell == space.baseline]
            candidates = of_baseline or waiting
            last: Cell = space.baseline
        else:
            candidates = waiting
            last = result[-1].cell
        distances = [_distance(space, start, last) for start in candidates]
        nearest = candidates[distances.index(min(distances))]
        waiting.remove(nearest)
        result += nearest
    return result


def _distance(space: Space, start: Sequence[Planned], last: Cell) -> int:
    """Return the minimum number of values in which a cell of a start differs from ``last``."""
    distances = []
    for planned in start:
        different = [axis for axis in space.axes if planned.cell[axis] != last[axis]]
        distances.append(len(different))
    return min(distances)


def refuse_arguments(plan: CellPlan, under_test: ServerConfiguration) -> None:
    """Check the arguments of each value with the engine's own parser.

    Args:
        plan: The cells.
        under_test: The configuration whose interpreter and variables are used.

    Raises:
        UsageError: The parser refuses the arguments of a value.
    """
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
