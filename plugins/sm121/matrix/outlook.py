"""What a matrix would be, before anything runs: its size, its coverage, its cost."""

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
    product = space.product_allowed()
    lines = [
        f"{space.engine} {space.version or '(any version)'}: {len(space.axes)} axes, "
        + " x ".join(str(len(space.values(axis))) for axis in space.axes)
        + f" = {space.product} combinations, "
        + (f"{product} of them allowed" if product is not None else "too many to count"),
        "",
        "| strength | array | with the cells that are always in | lower bound | of the product "
        "| coverage | predicted hours |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for strength in range(1, min(_MOST_STRENGTH, len(space.axes)) + 1):
        array = covering.build(space, strength)
        bare = covering.bare(space, strength)
        lines.append(
            f"| {strength} | {bare} | {len(array.cells)} | {covering.lower_bound(space, strength)} "
            f"| {len(array.cells) / (product or space.product):.1%} | {_coverage(space, array)} "
            f"| {_hours(space, array, settings):.1f} |"
        )
    boot, cell = settings.boot_s, settings.cell_s
    if product is not None:
        whole = product * (boot.value + cell.value) / 3600
        lines.append(f"| full | {product} | {product} | {product} | 100.0% | all | {whole:.1f} |")
    lines += ["", f"A boot {boot.value:g} s ({boot.source}), the checks of a cell "
              f"{cell.value:g} s ({cell.source})."]  # fmt: skip
    dropped = sorted({axis for axis, _ in space.absent} - set(space.axes))
    if dropped:
        lines += ["", f"Without a choice here: {', '.join(dropped)}."]
    return "\n".join(lines) + "\n"


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
