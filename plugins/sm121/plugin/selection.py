"""Selects the tests that apply to the target and the plan, and puts them in order."""

import contextlib
import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import Any, get_args

import pytest

from pytest_gpu_arch import markers as arch_markers
from pytest_gpu_arch import names as arch_names
from pytest_gpu_arch import status, target
from pytest_gpu_arch.expression import architectures_asked_for
from sm121.core import errors, plan_settings
from sm121.core.architecture import GPUS, NAMES
from sm121.core.level_settings import Ability
from sm121.core.profile import Profile
from sm121.core.profile_fields import LEVELS
from sm121.measure.plan import Plan
from sm121.plugin import expressions, library_warnings
from sm121.plugin.stash import APPLIES_TO, ID, LEVEL, SETTINGS
from sm121.run.record import Target
from sm121.session import certification
from sm121.session.settings import Settings
from sm121.session.target import resolve

#: The reason why a test of a level will not run; absent if it will run.
WHY_NOT = pytest.StashKey[str]()
SELECTED = pytest.StashKey[bool]()
COLLECTED = pytest.StashKey[Collection[str]]()
#: Tests of levels that -m, -k or --deselect removed: for each id, the architectures of the test.
DESELECTED = pytest.StashKey[dict[str, frozenset[str]]]()
_CERTIFIES = pytest.StashKey[Profile | None]()
#: One line, with a number of tests, for each kind of test that needs an option to run.
LEFT_OUT = pytest.StashKey[list[str]]()
#: The tests that the plan leaves out.
NOT_IN_PLAN = pytest.StashKey[list[pytest.Item]]()
_REGRESSION = "regression"
#: The fixtures of tests that need no server and measure no time. Any worker may run these tests.
_ALONE = frozenset({"kernels", "compilation"})
_SERVERS = frozenset({"server", "servers"})
#: pytest-benchmark's options for a comparison, by their names in pytest's configuration.
_COMPARING = ("benchmark_compare", "benchmark_compare_fail")
#: pytest-benchmark's options that store a run, by their names in pytest's configuration.
STORING = ("benchmark_autosave", "benchmark_save")


class LeftOutAs(enum.Enum):
    """The reason why a run leaves out a collected test."""

    UNCERTIFIED = "uncertified"
    SLOW = "slow"
    WAITING = "waiting"
    NOT_IN_PLAN = "not in plan"
    WITHOUT_SIDES = "without A and B"
    NO_CELLS = "no cells"


#: If a test is left out for one of these reasons, a certificate does not count it as missing: the
#: option that adds the test was not given.
_WITHOUT_OPTION = (LeftOutAs.WAITING, LeftOutAs.WITHOUT_SIDES, LeftOutAs.NO_CELLS)
#: Whether a test is left out for one of these reasons.
_NEEDS_OPTION = pytest.StashKey[bool]()
#: The marker of a test that runs only if its option is given.
_BY_OPTION = "asked_for"


def function_name(item: pytest.Item) -> str:
    """Return the name of a test's function, without parameters.

    Args:
        item: The test.
    """
    return str(getattr(item, "originalname", item.name))


def place_of_level(item: pytest.Item) -> int:
    """Return the index of a test's level in the order of a run.

    For a test without a level, the result is the index of the level smoke.

    Args:
        item: The test.
    """
    return LEVELS.index(item.stash.get(LEVEL, LEVELS[0]))


def _level_of(item: pytest.Item) -> str | None:
    marked = {mark.name for mark in item.iter_markers()}
    for name in LEVELS:
        if name in marked:
            return name
    return None


def compares(config: pytest.Config) -> bool:
    """Whether pytest-benchmark compares the run with a stored run.

    Args:
        config: The configuration of pytest.
    """
    return any(config.getoption(name, None) for name in _COMPARING)


def tell_target(config: pytest.Config) -> None:
    """Pass the target to the plugin `pytest_gpu_arch`, which skips tests outside the levels.

    Args:
        config: The configuration of pytest, after the settings have been read.
    """
    settings = config.stash[SETTINGS]
    config.stash[target.KNOWN] = target.Known(
        arch=settings.target.profile.arch if settings.target.profile is not None else None,
        is_remote=settings.base_url is not None,
    )
    config.stash[status.DECIDED_ELSEWHERE] = True


def by_level(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find the level of each test and its architectures; put the tests in order.

    Args:
        config: The configuration of pytest.
        items: The collected tests.

    Raises:
        pytest.UsageError: A test of a level has no marker `applies_to`.
    """
    for item in items:
        level = _level_of(item)
        if level is not None:
            _note_level(item, level)
    config.stash[COLLECTED] = frozenset(item.stash[ID] for item in items if ID in item.stash)
    items.sort(key=place_of_level)  # a stable sort keeps the order of the file within a level
    config.stash[_CERTIFIES] = None
    settings = config.stash[SETTINGS]
    if settings.judging.certify:
        architectures = architectures_asked_for(expressions.marker_expression(config))
        with contextlib.suppress(errors.UsageError):  # reported when the run is opened
            config.stash[_CERTIFIES] = resolve(settings, architectures).profile


def _note_level(item: pytest.Item, level: str) -> None:
    """Store the level and the architectures of a test in its stash, and add them as markers."""
    item.stash[LEVEL] = level
    item.stash[arch_markers.LEFT_ALONE] = True
    item.stash[ID] = item.nodeid
    library_warnings.only_warn_in(item)
    names = _applies_to(item)
    item.stash[APPLIES_TO] = names
    for name in sorted(names):
        item.add_marker(name)
    if names - {"cpu"}:
        item.add_marker("gpu")


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove tests that need an option, and tests that do not belong to the certificate or plan.

    A certificate does not require the tests that are removed here.

    Args:
        config: The configuration of pytest. Its stash gets a line for each kind of removed test.
        items: The collected tests. Only the selected tests remain in the list.
    """
    settings = config.stash[SETTINGS]
    chosen = settings.expected_profile()
    selected = []
    groups: dict[LeftOutAs, list[pytest.Item]] = {}
    for item in items:
        kind = left_out_as(config, item, chosen, settings.plan)
        if kind is None:
            selected.append(item)
        else:
            groups.setdefault(kind, []).append(item)
    items[:] = selected
    for kind in _WITHOUT_OPTION:
        for item in groups.get(kind, ()):
            item.stash[_NEEDS_OPTION] = True
    for left in groups.values():
        config.hook.pytest_deselected(items=left)
    config.stash[NOT_IN_PLAN] = groups.get(LeftOutAs.NOT_IN_PLAN, [])
    lines = config.stash.setdefault(LEFT_OUT, [])
    lines += _lines_on_levels(config, groups.get(LeftOutAs.UNCERTIFIED, ()))
    if LeftOutAs.SLOW in groups:
        lines.append(f"{len(groups[LeftOutAs.SLOW])} slow tests are left out; --slow runs them")
    if LeftOutAs.WAITING in groups:
        lines.append(_line_on_options(groups[LeftOutAs.WAITING]))


def _line_on_options(items: Collection[pytest.Item]) -> str:
    """Return the line about tests that need an option which is not given."""
    options = {str(mark.args[0]) for item in items for mark in item.iter_markers(_BY_OPTION)}
    return f"{len(items)} tests are left out; they need {', '.join(sorted(options))}"


def _lines_on_levels(config: pytest.Config, uncertified: Iterable[pytest.Item]) -> list[str]:
    """Return one line for each level that the certificate does not require."""
    certified = config.stash[_CERTIFIES]
    if certified is None:
        return []
    levels = Counter(item.stash[LEVEL] for item in uncertified)
    lines = []
    for level, number in levels.items():
        lines.append(
            f"{number} tests are left out: the certificate of profile {certified.name} does not "
            f"require the {level} level"
        )
    return lines


def left_out_as(
    config: pytest.Config, item: pytest.Item, chosen: Profile, plan: str
) -> LeftOutAs | None:
    """Return why a run with a given plan leaves out a collected test.

    Args:
        config: The configuration of pytest.
        item: The test.
        chosen: The profile of the run.
        plan: The name of the plan.

    Returns:
        The reason; None for a selected test.
    """
    settings = config.stash[SETTINGS]
    if _is_uncertified(config, item):
        return LeftOutAs.UNCERTIFIED
    if _is_slow(item):
        return LeftOutAs.SLOW
    mark = item.get_closest_marker(_BY_OPTION)
    if mark is not None and not config.getoption(str(mark.args[0])):
        return LeftOutAs.WAITING
    if LEVEL in item.stash and not is_asked(item, chosen, plan, settings):
        return LeftOutAs.NOT_IN_PLAN
    if item.get_closest_marker("ab_run") and config.getoption("--ab") is None:
        return LeftOutAs.WITHOUT_SIDES
    is_cell = item.stash.get(LEVEL, "") == "matrix"
    if is_cell and config.getoption("--matrix") == "none":
        return LeftOutAs.NO_CELLS
    return None


def is_asked(item: pytest.Item, chosen: Profile, name: str, settings: Settings) -> bool:
    """Whether a test belongs to a plan. Tests that an option selects belong to each plan.

    Args:
        item: The test. It has a level.
        chosen: The profile of the run.
        name: The name of the plan.
        settings: The settings of the run.
    """
    level = item.stash[LEVEL]
    markers = {marker.name for marker in item.iter_markers()}
    if markers & {"asked_for", "ab_run"}:
        return True
    if level == "matrix" and item.config.getoption("--matrix") is not None:
        return True
    abilities = [mark.args for mark in item.iter_markers() if mark.name == "ability"]
    if ("exam",) in abilities and item.config.getoption("--exam") is not None:
        return True
    if level == _REGRESSION and (stores(item.config) or compares(item.config)):
        return True
    if not chosen.plan(name).asks(level, function_name(item), markers):
        return False
    if level != "performance":
        return True
    plan = Plan.of(chosen, plan=name, sizes=settings.measuring.sizes)
    allowed = {
        "depth": plan.depths,
        "tokens": plan.generated_tokens,
        "streams": plan.measuring.concurrency,
    }
    sizes = parameters(item)
    return all(sizes[key] in values for key, values in allowed.items() if key in sizes)


def stores(config: pytest.Config) -> bool:
    """Whether pytest-benchmark stores the run.

    Args:
        config: The configuration of pytest.
    """
    return any(config.getoption(name, None) for name in STORING)


def parameters(item: pytest.Item) -> Mapping[str, Any]:
    """Return the parameters of a parametrized test; empty for other tests.

    Args:
        item: The test.
    """
    if not hasattr(item, "callspec"):
        return {}
    values: Mapping[str, Any] = item.callspec.params
    return values


def refuse_wrong_names(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Refuse a plan that names a test which does not exist in the collected module of its level.

    Args:
        config: The configuration of pytest.
        items: The collected tests.

    Raises:
        UsageError: The plan of the run names such a test.
    """
    settings = config.stash[SETTINGS]
    chosen = settings.expected_profile()
    row = chosen.plan(settings.plan)
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        wrong = strange_names(row, module)
        if wrong:
            raise errors.UsageError(
                f"profile {chosen.name}: key plans.{settings.plan}.tests: expected names of tests "
                f"or markers in {module.__name__}.py, got {', '.join(wrong)}"
            )


def strange_names(row: plan_settings.PlanRow, module: ModuleType) -> list[str]:
    """Return the names in a plan for which the module of their level has no test.

    Args:
        row: The plan.
        module: The module. Its name contains the level.
    """
    level = module.__name__.rpartition(".")[2].removeprefix("test_")
    entries: Iterable[str] = row.tests.get(level, ())  # type: ignore[call-overload]
    return [entry for entry in entries if not _has_test(module, entry)]


def _has_test(module: ModuleType, entry: str) -> bool:
    """Whether a module contains the test that an entry of a plan names."""
    for name, value in vars(module).items():
        if not name.startswith("test_"):
            continue
        markers = {mark.name for mark in getattr(value, "pytestmark", ())}
        if plan_settings.named(entry, name, markers):
            return True
    return False


def _is_uncertified(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether this is a certified run that does not require the test.

    A certified run requires the tests of some levels, and a soak if the profile has one.
    """
    certified = config.stash.get(_CERTIFIES, None)
    level = item.stash.get(LEVEL, None)
    if certified is None or level is None or level in certified.certify.levels:
        return False
    is_needed_soak = certified.certify.soak_s and item.stash[ID] == certification.SOAK
    return not is_needed_soak


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None and not item.config.getoption("--slow")


def note_deselected(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Remember which tests of levels pytest deselected.

    Args:
        config: The configuration of pytest.
        items: The deselected tests.
    """
    deselected = config.stash.setdefault(DESELECTED, {})
    for item in items:
        if LEVEL not in item.stash or _is_slow(item) or _is_uncertified(config, item):
            continue
        if item.stash.get(_NEEDS_OPTION, False):
            continue
        deselected[item.stash[ID]] = item.stash[APPLIES_TO]


def missed(config: pytest.Config, arch: str) -> list[str]:
    """Return the ids of the deselected tests that a certificate of the target requires.

    ``-m sm121`` also deselects tests of other architectures. A certificate of sm121 does not
    require these.

    Args:
        config: The configuration of pytest.
        arch: The architecture of the target.
    """
    deselected = config.stash.get(DESELECTED, {})
    return [name for name, applies_to in deselected.items() if arch in applies_to]


def mark(item: pytest.Item, chosen: Target) -> None:
    """Mark a test with the reason why it does not run, or with its timeout.

    Args:
        item: The test. It has a level.
        chosen: The target of the run.
    """
    names = item.stash[APPLIES_TO]
    if chosen.obstacle is not None:
        skip(item, chosen.obstacle)
        return
    if chosen.arch not in names:
        item.stash[WHY_NOT] = f"applies to {', '.join(sorted(names))}; the target is {chosen.arch}"
        item.add_marker(pytest.mark.skip(reason=item.stash[WHY_NOT]))
        return
    cannot = inability(item, chosen.profile)
    if cannot:
        skip(item, cannot)
    elif chosen.profile is not None and item.get_closest_marker("timeout") is None:
        limit = chosen.profile.test_timeout_s.get(item.stash[LEVEL])  # type: ignore[call-overload]
        if limit is not None:
            item.add_marker(pytest.mark.timeout(limit))


def skip(item: pytest.Item, why: str) -> None:
    """Mark a test as one that cannot run, unless it already has a reason.

    Args:
        item: The test.
        why: The reason.
    """
    if item.get_closest_marker("skip") is None:
        item.stash[WHY_NOT] = why
        item.add_marker(pytest.mark.skip(reason=why))


def uses_a_server(item: pytest.Item) -> bool:
    """Whether a test of a level may need the server, judged by its fixtures.

    Args:
        item: The test.
    """
    names = set(getattr(item, "fixturenames", ()))
    return bool(names & _SERVERS) or not names & _ALONE


def is_inapplicable(item: pytest.Item, chosen: Target) -> bool:
    """Whether a test does not apply to the target, so that no certificate requires it.

    Args:
        item: The test. It has a level.
        chosen: The target of the run.
    """
    return chosen.arch not in item.stash[APPLIES_TO] or bool(inability(item, chosen.profile))


def inability(item: pytest.Item, profile: Profile | None) -> str | None:
    """Return the reason why the profile's model cannot pass a test.

    Args:
        item: The test.
        profile: The profile of the run; None if nothing can run.

    Returns:
        The reason; None if the model must pass the test.

    Raises:
        pytest.UsageError: The test requires an ability that no profile defines.
    """
    marker = item.get_closest_marker("ability")
    if marker is None or profile is None:
        return None
    (name,) = marker.args
    if name not in get_args(Ability):
        raise pytest.UsageError(
            f"{item.nodeid}: ability({name!r}): expected an ability of a model, one of "
            f"{', '.join(get_args(Ability))}. For one of an engine call api.capabilities.require"
        )
    reason = profile.correctness.cannot.get(name)
    if reason:
        return f"profile {profile.name}: {name}: {reason}"
    return None


def _applies_to(item: pytest.Item) -> frozenset[str]:
    marker = item.get_closest_marker("applies_to")
    if marker is None or not marker.args:
        raise pytest.UsageError(
            f"{item.nodeid}: expected @pytest.mark.applies_to(...) on the test or its module"
        )
    names = {*marker.args}
    for name in names - {"gpu", *NAMES}:
        raise pytest.UsageError(
            f"{item.nodeid}: applies_to({name!r}): expected 'gpu' or one of {', '.join(NAMES)}"
        )
    if "gpu" in names:
        names.update(GPUS)
    by_hand = arch_markers.of(item)
    if not by_hand:
        return frozenset(names - {"gpu"})
    narrowed = frozenset(name for name in names - {"gpu"} if arch_names.has(by_hand, name))
    if not narrowed:
        raise pytest.UsageError(
            f"{item.nodeid}: expected markers of architectures that are in "
            f"applies_to{marker.args!r}, got only {', '.join(sorted(by_hand))}, so that the test "
            "would never run. Remove the marker, or add the architecture to applies_to"
        )
    return narrowed
