"""What may be given to a run, as far as its certificate and its fingerprint go.
``fixtures/options.toml`` says of each option of the suite what it does to what is measured, and
``fixtures/certificate.toml`` which of pytest's change nothing. ``--certify`` refuses the rest.
Settings, plugins and variables cannot be given: see `sm121.session.certified_run`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import pytest
from _pytest.config import builtin_plugins

from sm121.checkpoint.identity import is_of_shape
from sm121.core import architecture, arguments, data_file, errors, own_tests
from sm121.core.profile import FULL
from sm121.core.verdict import Severity
from sm121.evidence import environment
from sm121.matrix import covering
from sm121.plugin import outcomes, workers
from sm121.plugin.stash import ID
from sm121.run.record import Target
from sm121.session import certification, certified_run
from sm121.session.settings import Settings
from sm121.stress import soak


class _CertificateFile(data_file.DataTable):
    harmless: frozenset[str]
    selects: frozenset[str]
    may_be_left_out: frozenset[str]
    required: tuple[str, ...]
    judges: tuple[str, ...]


#: What pytest makes of --strict-markers and --strict-config.
_STRICT = ("strict_markers=true", "strict_config=true")


@dataclass(frozen=True)
class Given:
    """An option that was given: on the command line, in a variable or in pytest.ini."""

    name: str
    value: str
    effect: arguments.Effect


def _data() -> _CertificateFile:
    return data_file.load("certificate.toml", _CertificateFile)


def start(config: pytest.Config) -> NoReturn:
    """Begin the certified run that the command line asks for, in the place of this process. Raises
    pytest.UsageError: a variable stands against it."""
    words = [str(word) for word in config.invocation_params.args]
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    is_own_run = config.inipath == own_tests.settings()
    try:
        certified_run.start(own_tests.given(words) if is_own_run else words)
    except errors.UsageError as error:
        raise pytest.UsageError(str(error)) from error


def given(config: pytest.Config, own: Mapping[str, arguments.Argument]) -> list[Given]:
    """The options whose value is none of their defaults. `own`: the suite's, by pytest's names."""
    actions: dict[str, list[object]] = {}
    names: dict[str, str] = {}
    for action in config._parser.optparser._actions:
        actions.setdefault(action.dest, []).append(action.default)
        names.setdefault(action.dest, (action.option_strings or ["paths or node ids"])[-1])
    options = []
    suite_words = [
        [str(own_tests.folder() / "tests")],
        *own_tests.words(config.invocation_params.dir),
        *own_tests.certified_words(),
    ]
    for dest, value in sorted(vars(config.option).items()):
        defaults = actions.get(dest, [None])
        if dest == "benchmark_disable" and workers.is_parallel(config):
            continue  # the suite's own doing
        # argparse may have converted the text of a default.
        if value in ([], None, "") or str(value) in map(str, defaults):
            continue
        lists = isinstance(value, list) and dest in ("plugins", "override_ini")
        for part in value if lists else [value]:
            if part in suite_words:
                continue  # as `sm121 run` says it
            options.append(Given(names.get(dest, dest), str(part), _effect(dest, part, own)))
    return options


def _effect(dest: str, value: object, own: Mapping[str, arguments.Argument]) -> arguments.Effect:
    data = _data()
    if dest == "plan" and value == FULL:
        return "harmless"  # as a certificate has it
    if dest in own:
        return own[dest].effect
    if dest in data.selects:
        return "named" if dest == "markexpr" else "selects"
    if dest == "plugins":  # -p no:NAME leaves out a plugin that no test needs
        name = str(value).removeprefix("no:")
        needed = name in builtin_plugins or name.startswith(data.required)
        may_be = str(value).startswith("no:") and (name in data.may_be_left_out or not needed)
        return "harmless" if may_be else "measures"
    return "harmless" if dest in data.harmless or value in _STRICT else "measures"


def refuse_options(options: Sequence[Given]) -> None:
    """Refuse the options with which a certificate would be of something else. Raises UsageError:
    one was given that is not known to be harmless."""
    wrong = [
        each
        for each in options
        if each.effect in ("told", "selects", "measures")
        or (each.name == "-m" and each.value.strip() not in architecture.NAMES)
    ]
    if wrong:
        names = dict.fromkeys(f"{each.name} {each.value}"[:80] for each in wrong)
        raise errors.UsageError(
            f"--certify with {', '.join(names)}: expected a run as the profile "
            "says; leave these out, or put what they say into a profile of your own (--profile)"
        )


def refuse(
    config: pytest.Config, settings: Settings, target: Target, tests: Sequence[pytest.Item]
) -> None:
    """Refuse what would make the run with ``--certify`` another one than the suite's own, or what
    no certificate allows. Raises UsageError: the values of options are others, the tests were
    changed, or a waiver names a gate's test or a blocker."""
    wrong = [*_wrong_values(config, settings, target), *_wrong_waivers(settings, tests)]
    changed = environment.changed_files(own_tests.folder(), _data().judges)
    than = "the commit: commit it, or take it back"
    if changed is None:
        changed = certification.foreign_tests(own_tests.folder())
        than = "the file that ships with the suite (git knows no commit of it here)"
    if changed:
        wrong.append(f"{', '.join(changed[:5])} differs from {than}")
    if wrong:
        raise errors.UsageError(f"--certify: {'; '.join(wrong)}")


def _wrong_waivers(settings: Settings, tests: Sequence[pytest.Item]) -> Iterator[str]:
    blockers = {test.stash[ID] for test in tests if outcomes.severity_of(test) is Severity.BLOCKER}
    if names := [waiver.test for waiver in settings.waivers if waiver.test in blockers]:
        yield f"--waivers names {', '.join(names)}: {certification.NEVER_WAIVED}; take it out"


def _wrong_values(config: pytest.Config, settings: Settings, target: Target) -> Iterator[str]:
    expression = (config.getoption("markexpr", "") or "").strip()
    if expression not in ("", target.arch):
        yield f"-m {expression!r}: expected none, or the target, {target.arch}"
    if (profile := target.profile) is None:
        return
    text = config.getoption("--matrix")
    if text is not None and profile.matrix is not None:
        strength = covering.parse_strength(text)
        least = profile.matrix.strength
        if strength != "full" and not (isinstance(strength, int) and strength >= least):
            yield f"--matrix {text}: expected at least the profile's, {least}"
    # Another model than the profile's by name and shape; the fingerprint has its digest.
    served, model = settings.served_name, profile.model
    if settings.base_url is not None and served not in (None, model.served_name):
        yield (
            f"--served-model-name {served}: expected the profile's name, {model.served_name}, of "
            "the attached server"
        )
    elif settings.model not in (None, model.id) and not is_of_shape(settings.model, model.id):
        yield (
            f"--model {settings.model}: expected the profile's, {model.id}, or a folder whose "
            "config.json shows its shape; else say it in a profile of your own (--profile)"
        )
    name = settings.configuration
    # It has another question than the profile's, or is there to compare with.
    if name is not None and (name not in profile.fastest or profile.question is not None):
        yield (
            f"--configuration {name}: expected none, so that the profile's own question is asked, "
            f"or a profile of your own with `under_test = {name!r}` (--profile)"
        )
    duration, least_s = config.getoption("--soak"), profile.certify.soak_s
    if (soak.parse_duration(duration) if duration else 0.0) < least_s:
        named = f"--soak {duration}" if duration else "no --soak"
        yield f"{named}: expected --soak {least_s:g}s or more, as profile {profile.name} asks"
