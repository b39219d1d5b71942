"""The golden file of a run: the answers of a trusted server, which the run compares or records."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sm121.answers import golden, oracle_tolerance, prompts
from sm121.answers.golden import GoldenFile, Identity
from sm121.answers.oracle_tolerance import bound_for
from sm121.client.completions import Asker
from sm121.core import level_settings, model_folder
from sm121.core.profile import Profile
from sm121.core.server import Server
from sm121.session.session import Session

GOLDEN = pytest.StashKey[GoldenFile]()


def read(path: Path, session: Session) -> GoldenFile:
    """Read the file of ``--golden``, and check that it fits the run.

    A property of the served model that cannot be compared is a remark in the report.

    Args:
        path: The file.
        session: The run.

    Raises:
        UsageError: The file cannot be read, is of another model or of other prompts, or is not
            good enough for a certificate.
    """
    loaded = golden.load(path)
    served = _identity(session)
    origin = f"--golden {path}"
    golden.refuse_other(loaded, origin, served, prompts.continuations())
    if session.settings.judging.certify:
        golden.refuse_doubtful(loaded, origin)
    unproven = golden.unproven(loaded, served)
    if unproven is not None:
        session.run.record.remark(unproven)
    return loaded


def served_folder(session: Session) -> Path | None:
    """Return the folder of the served checkpoint; None if it is not known.

    Args:
        session: The run. It need not have a server yet.
    """
    run = session.run
    if run.servers.attached is not None or run.target.profile is None or not run.configurations:
        return None
    under_test = run.configurations.managed(run.profile.under_test)
    return model_folder.folder_of(under_test.model, under_test.variables, under_test.revision)


def _identity(session: Session) -> Identity:
    run = session.run
    if run.servers.attached is not None:
        return golden.identity(
            run.servers.attached.endpoint.served_name, session.settings.answers.reference
        )
    if run.target.profile is None or not run.configurations:
        return Identity(served_name="")
    under_test = run.configurations.managed(run.profile.under_test)
    return golden.identity(under_test.served_name, served_folder(session))


@pytest.fixture
def golden_bound(server: Server, profile: Profile) -> level_settings.GoldenBound:
    """The profile's tolerance against a golden file.

    Args:
        server: The server under test.
        profile: The profile.

    Raises:
        NotRun: The profile has no tolerance for the server's dtype.
    """
    return bound_for(profile.correctness.golden, server, profile, "golden")


@pytest.fixture
def golden_file(pytestconfig: pytest.Config) -> GoldenFile:
    """The file of ``--golden``. Its model and its prompts are those of this run.

    Args:
        pytestconfig: The configuration of pytest, whose stash contains the file.
    """
    return pytestconfig.stash[GOLDEN]


@pytest.fixture
def recorder(
    conformance: Session, asker: Asker, server: Server, profile: Profile
) -> Callable[[], GoldenFile]:
    """Records the answers of the server under test.

    Args:
        conformance: The run, which knows the served model and the environment.
        asker: Requests the answers.
        server: The server under test.
        profile: The profile, which contains the dtype of an attached server.

    Returns:
        A function that requests the answers and returns them as a golden file, without writing it.
    """
    return lambda: golden.record(
        asker,
        prompts.continuations(),
        model=_identity(conformance),
        dtype=oracle_tolerance.dtype_of(server, profile),
        engine=server.engine,
        engine_version=server.version or conformance.run.record.file.engine.version,
        configuration=profile.under_test,
        environment=conformance.run.record.file.environment,
    )
