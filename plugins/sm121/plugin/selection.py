"""Which tests apply to the target, in which order, and which architecture was asked for."""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, get_args

import pytest
from _pytest.mark.expression import Expression

from sm121.core import errors, own_tests, profile
from sm121.core.architecture import CPU, GPUS, NAMES
from sm121.core.level_settings import Ability
from sm121.core.profile import PlanRow, Profile
from sm121.core.profile_fields import LEVELS
from sm121.measure.plan import Plan
from sm121.plugin import others
from sm121.plugin.stash import APPLIES_TO, ID, LEVEL, SETTINGS
from sm121.run.record import Target
from sm121.run.verdict_file import TestReport
from sm121.session import certification
from sm121.session.session import Session
from sm121.session.settings import Settings
from sm121.session.target import resolve

_OPERATORS = frozenset({"and", "or", "not"})
#: Names of a ``-m`` expression that are tried in all combinations; of more, only so many.
_MOST_WORDS = 10
#: Why a test of a level will not run; None for one that will.
WHY_NOT = pytest.StashKey[str]()
SELECTED = pytest.StashKey[bool]()
COLLECTED = pytest.StashKey[Collection[str]]()
#: Level tests that -m, -k or --deselect removed: the ids, and what each applies to.
DESELECTED = pytest.StashKey[dict[str, frozenset[str]]]()
_CERTIFIES = pytest.StashKey[Profile | None]()
#: A line for each kind of test that is left out without its option, with the number of tests.
LEFT_OUT = pytest.StashKey[list[str]]()
#: The tests that the plan leaves out.
NOT_IN_PLAN = pytest.StashKey[list[pytest.Item]]()
_REGRESSION = "regression"
_COMPARED_IN = "test_regression.py"
#: Its tests that hold for a part of what was stored. What a named part leaves out is not missing.
_COMPARED_BY = ("test_no_metric_is_worse", "test_no_level_came_down")
#: Fixtures of tests that need no server and measure no time: they may run anywhere.
_ALONE = frozenset({"kernels", "compilation"})
_SERVERS = frozenset({"server", "servers"})
#: Options of pytest-benchmark that this level judges, by the names under which pytest keeps them.
_COMPARING = ("benchmark_compare", "benchmark_compare_fail")
#: Those that store a run: the level says how it compares with what is stored already.
STORING = ("benchmark_autosave", "benchmark_save")


def refuse_wrong_expressions(config: pytest.Config) -> None:
    """Raises UsageError: pytest cannot parse the expression of ``-k`` or ``-m``."""
    for option, name in (("-k", "keyword"), ("-m", "markexpr")):
        expression = config.getoption(name, "") or ""
        try:
            Expression.compile(expression)
        except SyntaxError as error:
            what = f"at column {error.offset}: {error.msg}"
            raise errors.UsageError(f"{option} {expression!r}: {what}") from error
        except Exception as error:  # before pytest 9: an exception of its own, "at column N: ..."
            raise errors.UsageError(f"{option} {expression!r}: {error}") from error


def names_tests(config: pytest.Config) -> bool:
    """Whether the command line names levels or tests: by a path, by ``-k``, or by ``-m`` with a
    marker that is no architecture's."""
    folder = config.invocation_params.dir
    paths = [folder / str(path).partition("::")[0] for path in config.args]
    if any("::" in str(path) for path in config.args):
        return True
    if not all(own_tests.has_every_level(path) for path in paths):
        return True
    expression = config.getoption("markexpr", "") or ""
    markers = {*re.findall(r"[A-Za-z_]\w*", expression)} - {*_OPERATORS, *NAMES, "gpu"}
    return bool(config.getoption("keyword", "") or _asked_for(expression, sorted(markers)))


def name_comparison(config: pytest.Config) -> None:
    """Collect the tests that compare, where paths name others and ``--benchmark-compare`` asks."""
    own = own_tests.folder() / "tests"
    folder = config.invocation_params.dir
    paths = [(folder / str(path).partition("::")[0]).resolve() for path in config.args]
    names_own = any(path.is_relative_to(own) for path in paths)
    has_it = own / _COMPARED_IN in paths or any(map(own_tests.has_every_level, paths))
    if _compares(config) and names_own and not has_it:
        config.args += [f"{own / _COMPARED_IN}::{name}" for name in _COMPARED_BY]


def hold_comparison(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Take the tests that compare out of a ``-k`` or ``-m`` that does not speak of their level."""
    words = f"{config.getoption('keyword', '')} {config.getoption('markexpr', '')}"
    if not _compares(config) or _REGRESSION in words:
        return []
    deselected = tuple(config.getoption("deselect", None) or ())
    held = [
        item
        for item in items
        if item.stash.get(LEVEL, "") == _REGRESSION
        and getattr(item, "originalname", item.name) in _COMPARED_BY
        and not item.nodeid.startswith(deselected)
    ]
    items[:] = [item for item in items if item not in held]
    return held


def put_back(items: list[pytest.Item], held: Sequence[pytest.Item]) -> None:
    """Put what `hold_comparison` took out where it stood: before the matrix."""
    if not held:
        return
    items += held
    items.sort(key=lambda item: LEVELS.index(item.stash.get(LEVEL, LEVELS[0])))


def _compares(config: pytest.Config) -> bool:
    return any(config.getoption(name, None) for name in _COMPARING)


def by_level(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find the level of each test and the architectures that it is for; put them in order. Raises
    UsageError: a test of a level does not say what it applies to."""
    for item in items:
        level = next((name for name in LEVELS if item.get_closest_marker(name)), None)
        if level is None:
            continue
        item.stash[LEVEL] = level
        item.stash[ID] = item.nodeid
        others.only_warn_in(item)
        item.stash[APPLIES_TO] = names = _applies_to(item)
        for name in sorted(names):
            item.add_marker(name)
        if names - {"cpu"}:
            item.add_marker("gpu")
    config.stash[COLLECTED] = frozenset(item.stash[ID] for item in items if ID in item.stash)
    # Stable: within a level the order of the file stays. Tests of no level sort with smoke.
    items.sort(key=lambda item: LEVELS.index(item.stash.get(LEVEL, LEVELS[0])))
    config.stash[_CERTIFIES] = None
    settings = config.stash[SETTINGS]
    if settings.certify:
        architectures = architectures_asked_for(config.getoption("markexpr", "") or "")
        with contextlib.suppress(errors.UsageError):  # said to the user when the run is opened
            config.stash[_CERTIFIES] = resolve(settings, architectures).profile
    config.stash[SELECTED] = True


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need an option of their own, and those of levels that the certificate
    does not ask for. That is no gap in a certificate."""
    settings = config.stash[SETTINGS]
    chosen = profile.expected(settings.profile, settings.arch, settings.engine)
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(left_out_as(config, item, chosen, settings.plan), []).append(item)
    items[:] = groups.pop("", [])
    for kind in ("uncertified", "slow", "not in plan"):
        if kind in groups:
            config.hook.pytest_deselected(items=groups[kind])
    lines = config.stash.setdefault(LEFT_OUT, [])
    certified = config.stash[_CERTIFIES]
    if certified is not None:
        levels = Counter(item.stash[LEVEL] for item in groups.get("uncertified", ()))
        lines += [
            f"{number} tests are left out: the certificate of profile {certified.name} does not "
            f"ask for the {level} level"
            for level, number in levels.items()
        ]
    config.stash[NOT_IN_PLAN] = groups.get("not in plan", [])
    texts = {
        "slow": "slow tests are left out; --slow runs them",
        "waiting": "tests wait for an option of theirs (--golden, --record-golden, --soak)",
    }
    lines += [f"{len(groups[kind])} {text}" for kind, text in texts.items() if kind in groups]


def left_out_as(config: pytest.Config, item: pytest.Item, chosen: Profile, plan: str) -> str:
    """Return why a run of a plan leaves a collected test out; empty where it has the test."""
    settings = config.stash[SETTINGS]
    if _is_uncertified(config, item):
        return "uncertified"
    if _is_slow(item):
        return "slow"
    mark = item.get_closest_marker("asked_for")
    if mark is not None and not config.getoption(str(mark.args[0])):
        return "waiting"
    if LEVEL in item.stash and not is_asked(item, chosen, plan, settings):
        return "not in plan"
    if item.get_closest_marker("ab_run") and config.getoption("--ab") is None:
        return "without A and B"
    is_cell = item.stash.get(LEVEL, "") == "matrix"
    if is_cell and config.getoption("--matrix") == "none":
        return "no cells"
    return ""


def is_asked(item: pytest.Item, chosen: Profile, name: str, settings: Settings) -> bool:
    """Whether a plan of a profile asks a test; each asks what has an option of its own."""
    level = item.stash[LEVEL]
    markers = {marker.name for marker in item.iter_markers()}
    strength = item.config.getoption("--matrix") if level == "matrix" else None
    if strength is not None or markers & {"asked_for", "ab_run"}:
        return True
    stores = any(item.config.getoption(name, None) for name in STORING)
    if level == _REGRESSION and (stores or _compares(item.config)):
        return True
    if not chosen.plan(name).asks(level, getattr(item, "originalname", item.name), markers):
        return False
    plan = Plan.of(chosen, plan=name, sizes=settings.sizes)
    allowed = {
        "depth": plan.depths,
        "tokens": plan.generated_tokens,
        "streams": plan.measuring.concurrency,
    }
    sizes = parameters(item) if level == "performance" else {}
    return all(sizes[key] in values for key, values in allowed.items() if key in sizes)


def parameters(item: pytest.Item) -> Mapping[str, Any]:
    """The values that a parametrized test has; empty for another one."""
    if not hasattr(item, "callspec"):
        return {}
    values: Mapping[str, Any] = item.callspec.params
    return values


def refuse_wrong_names(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Raises UsageError: a plan names what is no test of a level whose module was collected."""
    settings = config.stash[SETTINGS]
    chosen = profile.expected(settings.profile, settings.arch, settings.engine)
    row = chosen.plan(settings.plan)
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        wrong = strange_names(row, module)
        if wrong:
            raise errors.UsageError(
                f"profile {chosen.name}: key plans.{settings.plan}.tests: expected names of tests "
                f"or markers in {module.__name__}.py, got {', '.join(wrong)}"
            )


def strange_names(row: PlanRow, module: ModuleType) -> list[str]:
    """What a plan names of a level and the level's module does not have."""
    tests = {
        name: {mark.name for mark in getattr(value, "pytestmark", ())}
        for name, value in vars(module).items()
        if name.startswith("test_")
    }
    level = module.__name__.rpartition(".")[2].removeprefix("test_")
    return [
        entry
        for entry in row.tests.get(level, ())  # type: ignore[call-overload]
        if not any(profile.named(entry, *test) for test in tests.items())
    ]


def _is_uncertified(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether a certificate is asked for that does not ask for the test's level, nor for a soak."""
    profile = config.stash.get(_CERTIFIES, None)
    level = item.stash.get(LEVEL, None)
    if profile is None or level is None or level in profile.certify.levels:
        return False
    return not (profile.certify.soak_s and item.stash[ID] == certification.SOAK)


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None and not item.config.getoption("--slow")


def note_deselected(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Remember which tests of levels pytest deselected."""
    tests = [item for item in items if LEVEL in item.stash]
    removed = [item for item in tests if not _is_slow(item) and not _is_uncertified(config, item)]
    deselected = config.stash.setdefault(DESELECTED, {})
    deselected.update({item.stash[ID]: item.stash[APPLIES_TO] for item in removed})


def asks_for(config: pytest.Config, session: Session) -> Callable[[TestReport], bool]:
    """Whether a test that is not in this run was asked for: it was not collected, and would have
    been if it were there. What -m, -k, a plan or an option leaves out was not asked for, nor was
    what lies outside the paths that were given."""
    settings = config.stash[SETTINGS]
    has_paths = config.args_source is pytest.Config.ArgsSource.ARGS
    paths = [_relative(config, path) for path in config.args] if has_paths else []
    if any(path in (".", "tests") for path in paths):
        paths = []
    narrowed = {"performance"} if settings.sizes.only_depths is not None else set()
    if config.getoption("--matrix") is not None:
        narrowed.add("matrix")

    words = config.getoption("keyword", "") or ""
    marks = config.getoption("markexpr", "") or ""
    plan = session.profile.plan(settings.plan) if session.target.profile is not None else None
    # What the plan names that is no name of a test.
    markers: dict[str, set[str]] = {
        level: {entry for entry in entries if not entry.startswith("test_")}
        for level, entries in (plan.tests.items() if plan is not None else ())
    }
    arch = {session.arch, "gpu"} if session.arch != CPU else {CPU}
    others = set(re.findall(r"[A-Za-z_]\w*", marks)) - {*LEVELS, *NAMES, "gpu", "slow"}

    def selected(test: TestReport) -> bool:
        """Whether -k, -m and the plan take a test that is not there. It may have had any marker
        that they name beside level and architecture."""
        name = test.id.rpartition("::")[2].partition("[")[0]
        id_ = test.id.lower()
        return (
            (not words or _evaluate_with(words, lambda word: word.lower() in id_))
            and (not marks or any(_evaluate(marks, {test.level, *arch, *m}) for m in ((), others)))
            and (plan is None or plan.asks(test.level, name, markers.get(test.level, ())))
        )

    def asked(test: TestReport) -> bool:
        within = not paths or any(
            test.id == path or test.id.startswith((f"{path}/", f"{path}::", f"{path}["))
            for path in paths
        )
        is_absent = test.id not in session.collected and test.level not in narrowed
        return within and is_absent and selected(test)

    return asked


def _relative(config: pytest.Config, path: str) -> str:
    file, separator, rest = path.partition("::")
    absolute = (config.invocation_params.dir / file).resolve()
    try:
        file = absolute.relative_to(config.rootpath.resolve()).as_posix()
    except ValueError:
        file = absolute.as_posix()
    return f"{file}{separator}{rest}"


def missed(config: pytest.Config, arch: str) -> list[str]:
    """Ids of the deselected tests that apply to a target: each is a gap in its certificate. ``-m
    sm121`` also deselects the tests of other targets, which no certificate of sm121 needs."""
    deselected = config.stash.get(DESELECTED, {})
    return [name for name, applies_to in deselected.items() if arch in applies_to]


def mark(item: pytest.Item, chosen: Target) -> None:
    """Mark each test with the reason why it does not run, or with its time limit."""
    names = item.stash[APPLIES_TO]
    if chosen.obstacle is not None:
        skip(item, chosen.obstacle)
    elif chosen.arch not in names:
        item.stash[WHY_NOT] = f"applies to {', '.join(sorted(names))}; the target is {chosen.arch}"
        item.add_marker(pytest.mark.skip(reason=item.stash[WHY_NOT]))
    elif cannot := inability(item, chosen.profile):
        skip(item, cannot)
    elif chosen.profile is not None and item.get_closest_marker("timeout") is None:
        limit = chosen.profile.test_timeout_s.get(item.stash[LEVEL])  # type: ignore[call-overload]
        if limit is not None:
            item.add_marker(pytest.mark.timeout(limit))


def skip(item: pytest.Item, why: str) -> None:
    """Mark a test that cannot run, unless it has another reason already."""
    if item.get_closest_marker("skip") is None:
        item.stash[WHY_NOT] = why
        item.add_marker(pytest.mark.skip(reason=why))


def uses_a_server(item: pytest.Item) -> bool:
    """Whether a test of a level needs the server: it may, if nothing says that it does not."""
    names = set(getattr(item, "fixturenames", ()))
    return bool(names & _SERVERS) or not names & _ALONE


def is_inapplicable(item: pytest.Item, chosen: Target) -> bool:
    """Whether a test is needed by no certificate of the target."""
    return chosen.arch not in item.stash[APPLIES_TO] or bool(inability(item, chosen.profile))


def inability(item: pytest.Item, profile: Profile | None) -> str | None:
    """Why the profile's model cannot pass a test; None when it must pass."""
    marker = item.get_closest_marker("ability")
    if marker is None or profile is None:
        return None
    (name,) = marker.args
    if name not in get_args(Ability):
        raise pytest.UsageError(f"{item.nodeid}: ability({name!r}): expected {get_args(Ability)}")
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
    for name in {*marker.args} - {"gpu", *NAMES}:
        raise pytest.UsageError(
            f"{item.nodeid}: applies_to({name!r}): expected 'gpu' or one of {', '.join(NAMES)}"
        )
    return frozenset({*marker.args} - {"gpu"} | {*(GPUS if "gpu" in marker.args else ())})


def architectures_asked_for(expression: str) -> tuple[str, ...]:
    """Architectures that a ``-m`` expression asks for by name. ``sm121 and smoke`` asks for sm121;
    ``not sm121`` and ``smoke`` ask for none."""
    named = [name for name in NAMES if re.search(rf"\b{name}\b", expression)]
    if not named:
        return ()
    return _asked_for(expression, named)


def _asked_for(expression: str, names: Sequence[str]) -> tuple[str, ...]:
    """The markers that a ``-m`` expression asks for: ``not slow`` asks for none."""
    words = sorted({*re.findall(r"[A-Za-z_]\w*", expression)} - _OPERATORS)

    def asked(name: str) -> bool:
        """Whether some test is selected with the marker and not without it."""
        others = [word for word in words if word != name][:_MOST_WORDS]
        return any(
            _evaluate(expression, {name, *present}) and not _evaluate(expression, set(present))
            for count in range(len(others) + 1)
            for present in itertools.combinations(others, count)
        )

    return tuple(name for name in names if asked(name))


def asked_for_levels(config: pytest.Config) -> bool:
    """Whether somebody wants to know of a target: by ``--certify``, or by an architecture's name.
    False in a worker, and where pytest only shows something."""
    shows = ("collectonly", "showfixtures", "show_fixtures_per_test", "cacheshow")
    if hasattr(config, "workerinput") or any(getattr(config.option, n, None) for n in shows):
        return False
    settings = config.stash.get(SETTINGS, None)
    expression = config.getoption("markexpr", "") or ""
    return settings is not None and bool(
        settings.certify or settings.arch or architectures_asked_for(expression)
    )


def selects_any(expression: str, items: Sequence[pytest.Item], arch: str) -> bool:
    """Whether ``-m`` would select one of the tests if they were for ``arch`` alone."""
    of_arch = {arch} if arch == CPU else {arch, "gpu"}
    return not expression or any(
        _evaluate(expression, {m.name for m in item.iter_markers()} - {*NAMES, "gpu"} | of_arch)
        for item in items
    )


def _evaluate(expression: str, names: set[str]) -> bool:
    return _evaluate_with(expression, names.__contains__)


def _evaluate_with(expression: str, has: Callable[[str], bool]) -> bool:
    def matcher(candidate: str, /, **_keywords: str | int | bool | None) -> bool:
        return has(candidate)

    return bool(Expression.compile(expression).evaluate(matcher))
