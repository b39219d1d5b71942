"""What a matrix would be, before anything runs: its size, its coverage, its cost."""

from __future__ import annotations

from sm121.core.errors import UsageError
from sm121.core.profile import MatrixPlan, Profile
from sm121.matrix import axes, cost, covering
from sm121.matrix.axes import Space, identity
from sm121.matrix.covering import Array

_MOST_STRENGTH = 3


def space_of(
    profile: Profile,
    *,
    axes_file: str | None = None,
    engine: str | None = None,
    version: str | None = None,
    build: str | None = None,
) -> Space:
    """The axes of a profile, as an engine has them.

    Raises:
        UsageError: the profile has none, or they contradict themselves.
    """
    plan = _plan(profile)
    file = axes.load(axes_file or plan.axes)
    return Space(file, engine or profile.engine.name, version, build or plan.build)


def sizes(profile: Profile, space: Space) -> str:
    """A Markdown table: strength, cells, lower bound, coverage, predicted machine hours."""
    plan = _plan(profile)
    product = space.product_allowed()
    build = f", build {space.build}" if space.build else ""
    lines = [
        f"{space.engine} {space.version or '(any version)'}{build}: {len(space.axes)} axes, "
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
        found = covering.coverage(space, [p.cell for p in array.cells], strength)
        lines.append(
            f"| {strength} | {bare} | {len(array.cells)} | {covering.lower_bound(space, strength)} "
            f"| {len(array.cells) / (product or space.product):.1%} | {found} "
            f"| {_hours(space, array, plan):.1f} |"
        )
    if product is not None:
        whole = product * (plan.boot_s.value + plan.cell_s.value) / 3600
        lines.append(f"| full | {product} | {product} | {product} | 100.0% | all | {whole:.1f} |")
    lines += ["", f"A boot {plan.boot_s.value:g} s ({plan.boot_s.source}), the checks of a cell "
              f"{plan.cell_s.value:g} s ({plan.cell_s.source})."]  # fmt: skip
    dropped = sorted({axis for axis, _ in space.absent} - set(space.axes))
    if dropped:
        lines += ["", f"Without a choice here: {', '.join(dropped)}."]
    return "\n".join(lines) + "\n"


def cells(profile: Profile, space: Space, strength: str, *, focus: str | None = None) -> str:
    """The cells of one array, a line each."""
    plan = _plan(profile)
    array = covering.build(space, covering.parse_strength(strength), focus=focus)
    lines = [f"{identity(space, p.cell)}\t({', '.join(p.why)})" for p in array.cells]
    lines += [f"not in: {name}: {rule.reason}" for name, (_, rule) in array.incompatible.items()]
    lines += [f"{name}: {why}" for name, why in array.absent.items()]
    number = array.strength if isinstance(array.strength, int) else 2
    found = covering.coverage(space, [p.cell for p in array.cells], min(number, len(space.axes)))
    lines += [f"{len(array.cells)} cells, {found}; {_hours(space, array, plan):.1f} machine hours"]
    return "\n".join(lines) + "\n"


def _hours(space: Space, array: Array, plan: MatrixPlan) -> float:
    found = [planned.cell for planned in array.cells]
    keys = [str((space.arguments(cell), space.environment(cell))) for cell in found]
    return cost.predict(space, found, keys, plan).seconds / 3600


def _plan(profile: Profile) -> MatrixPlan:
    if profile.matrix is None:
        raise UsageError(f"profile {profile.name} has no [matrix]")
    return profile.matrix
