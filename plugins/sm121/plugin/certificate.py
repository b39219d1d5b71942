"""``pytest --certify``: checks that the options and waivers of a run allow a certificate.

A certified run accepts only the options in ``fixtures/certificate.toml``. The user's pytest
settings, plugins and environment variables have no effect on the run: see
`sm121.session.certified_run`.
"""

from collections.abc import Iterator, Sequence
from typing import NoReturn

import pytest

from sm121.checkpoint.identity import is_of_shape
from sm121.core import architecture, data_file, errors, own_tests
from sm121.core.verdict import Severity
from sm121.evidence import git_source
from sm121.plugin import outcomes, terminal
from sm121.plugin.given import Given
from sm121.plugin.stash import ID
from sm121.run.record import Target
from sm121.session import certification, certified_run
from sm121.session.settings import Settings
from sm121.stress import soak


class _CertificateFile(data_file.DataTable):
    server: frozenset[str]
    certificate: frozenset[str]
    results: frozenset[str]
    judges: tuple[str, ...]


def _data() -> _CertificateFile:
    return data_file.load("certificate.toml", _CertificateFile)


def start(config: pytest.Config) -> NoReturn:
    """Replace this process with the certified run that the command line requests.

    Args:
        config: The configuration of pytest.

    Raises:
        pytest.UsageError: An environment variable is set that no certificate allows.
    """
    words = [str(word) for word in config.invocation_params.args]
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    if config.inipath == own_tests.settings():  # without the arguments that `sm121 run` added
        words = own_tests.given(words)
    try:
        certified_run.start(words)
    except errors.UsageError as error:
        raise pytest.UsageError(str(error)) from error


def show_removed_variables(config: pytest.Config) -> None:
    """Show which variables of the caller do not reach a certified run.

    Args:
        config: The configuration of pytest. The run is open, since a refused run prints only its
            refusal.
    """
    names = certified_run.removed_variables()
    if config.getoption("--certify") and names:
        terminal.say(config, "certificate", f"runs without these variables: {', '.join(names)}")


def refuse_options(options: Sequence[Given]) -> None:
    """Refuse options that would change what the certificate is about.

    Args:
        options: The options that were given.

    Raises:
        UsageError: An option is not in ``fixtures/certificate.toml``, or ``-m`` names anything
            but an architecture.
    """
    data = _data()
    allowed = data.server | data.certificate | data.results
    wrong = []
    for option in options:
        is_other_marker = (
            option.dest == "markexpr" and option.value.strip() not in architecture.NAMES
        )
        if option.dest not in allowed or is_other_marker:
            wrong.append(option)
    if wrong:
        names = ", ".join(f"{option.name} {option.value}"[:80] for option in wrong)
        raise errors.UsageError(
            f"--certify with {names}: expected a run with the settings of the profile. Leave "
            "these options out, or set their values in a profile of your own (--profile)."
        )


def refuse(
    config: pytest.Config, settings: Settings, target: Target, tests: Sequence[pytest.Item]
) -> None:
    """Refuse changed tests, option values that no certificate allows, and forbidden waivers.

    Args:
        config: The configuration of pytest.
        settings: The settings of the run.
        target: The target.
        tests: The selected tests of levels.

    Raises:
        UsageError: An option has a value that no certificate allows, a test file was changed, or a
            waiver names the test of a gate or a blocker.
    """
    wrong = [*_wrong_values(config, settings, target), *_wrong_waivers(settings, tests)]
    changed = git_source.changed_files(own_tests.folder(), _data().judges)
    than = "the commit: commit the change, or revert it"
    if changed is None:
        changed = certification.foreign_tests(own_tests.folder())
        than = "the shipped file (git has no commit of it here)"
    if changed:
        wrong.append(f"{', '.join(changed[:5])} differs from {than}")
    if wrong:
        raise errors.UsageError(f"--certify: {'; '.join(wrong)}")


def _wrong_waivers(settings: Settings, tests: Sequence[pytest.Item]) -> Iterator[str]:
    blockers = set()
    for test in tests:
        if outcomes.severity_of(test) is Severity.BLOCKER:
            blockers.add(test.stash[ID])
    names = [waiver.test for waiver in settings.judging.waivers if waiver.test in blockers]
    if names:
        yield f"--waivers names {', '.join(names)}: {certification.NEVER_WAIVED}; take it out"


def _wrong_values(config: pytest.Config, settings: Settings, target: Target) -> Iterator[str]:
    expression = (config.getoption("markexpr", "") or "").strip()
    if expression not in ("", target.arch):
        yield f"-m {expression!r}: expected none, or the target, {target.arch}"
    profile = target.profile
    if profile is None:
        return
    # The model's name and shape differ from the profile's. The fingerprint contains its digest.
    served = settings.target.served_name
    model = profile.model
    folder = settings.target.model
    if settings.base_url is not None and served not in (None, model.served_name):
        yield (
            f"--served-model-name {served}: expected the profile's name, {model.served_name}, of "
            "the attached server"
        )
    elif folder not in (None, model.id) and not is_of_shape(folder, model.id):
        yield (
            f"--model {folder}: expected the profile's, {model.id}, or a folder whose config.json "
            "shows its shape; otherwise name it in a profile of your own (--profile)"
        )
    duration = config.getoption("--soak")
    least_s = profile.certify.soak_s
    soak_s = 0.0
    named = "no --soak"
    if duration:
        soak_s = soak.parse_duration(duration)
        named = f"--soak {duration}"
    if soak_s < least_s:
        yield f"{named}: expected --soak {least_s:g}s or more, as profile {profile.name} requires"
