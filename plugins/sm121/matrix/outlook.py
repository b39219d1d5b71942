"""What a matrix would be, before anything runs: its size, its coverage, its cost."""

from sm121.core import templates
from sm121.core.level_settings import MatrixPlan
from sm121.core.profile import Profile
from sm121.matrix import cost, covering
from sm121.matrix.axes import Space, identity
from sm121.matrix.plan import CellPlan, make_plan, settings_of, space_of

_MOST_STRENGTH = 3


def table(profile: Profile, *names: str | None, strength: str | None) -> str:
    """The cells of an array of that strength; without one, the sizes of all. `names`: of the file
    of axes, the engine and its version."""
    space = space_of(profile, *names)
    if strength is None:
        return sizes(profile, space)
    return cells(make_plan(profile, space, strength=strength))


def sizes(profile: Profile, space: Space) -> str:
    """A Markdown table: strength, cells, lower bound, coverage, predicted machine hours."""
    settings = settings_of(profile)
    arrays = [
        covering.build(space, strength)
        for strength in range(1, min(_MOST_STRENGTH, len(space.axes)) + 1)
    ]
    environment = templates.environment(package="sm121.matrix")
    return environment.get_template("sizes.md.j2").render(
        space=space,
        settings=settings,
        product=space.product_allowed(),
        arrays=arrays,
        bare=[covering.bare(space, number) for number, _ in enumerate(arrays, 1)],
        bounds=[covering.lower_bound(space, number) for number, _ in enumerate(arrays, 1)],
        coverage=[_coverage(space, array) for array in arrays],
        hours=[_hours(space, array, settings) for array in arrays],
        dropped=sorted({axis for axis, _ in space.absent} - set(space.axes)),
    )


def cells(plan: CellPlan) -> str:
    """The cells of one array, a line each."""
    space, array = plan.space, plan.array
    lines = [f"{identity(space, p.cell)}\t({', '.join(p.why)})" for p in array.cells]
    lines += [f"not in: {name}: {rule.reason}" for name, rule in array.incompatible.items()]
    lines += [f"{name}: {why}" for name, why in array.absent.items()]
    hours = seconds(plan) / 3600
    lines += [f"{len(array.cells)} cells, {_coverage(space, array)}; {hours:.1f} machine hours"]
    return "\n".join(lines) + "\n"


def seconds(plan: CellPlan) -> float:
    """How long the cells of a plan take where none was timed."""
    return _hours(plan.space, plan.array, plan.settings) * 3600


def of_run(plan: CellPlan) -> list[str]:
    """What a run will try, a line each."""
    space, array = plan.space, plan.array
    return [
        f"{space.engine} {space.version or '(version unknown)'}: {len(space.axes)} axes "
        f"({', '.join(space.axes)}), {space.product} combinations",
        f"strength {array.strength}: {len(array.cells)} cells; {_coverage(space, array)}",
    ]


def _coverage(space: Space, array: covering.Array) -> covering.Coverage:
    number = array.strength if isinstance(array.strength, int) else 2
    return covering.coverage(space, [p.cell for p in array.cells], min(number, len(space.axes)))


def _hours(space: Space, array: covering.Array, settings: MatrixPlan) -> float:
    cells = [planned.cell for planned in array.cells]
    keys = [str((space.arguments(cell), space.environment(cell))) for cell in cells]
    return cost.predict(space, cells, keys, settings).seconds / 3600
