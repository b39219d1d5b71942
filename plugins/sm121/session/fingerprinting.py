"""Computes the fingerprint of a run from its settings, its build and its machine."""

import importlib.util
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from sm121.checkpoint.identity import identity
from sm121.core import data_file, digest, profile
from sm121.core.redaction import is_secret_name, redact_arguments
from sm121.engines.registry import Installed
from sm121.evidence.environment import relevant_environment
from sm121.evidence.environment_record import EnvironmentRecord
from sm121.machine import this_machine
from sm121.matrix import axes
from sm121.performance.recorder import host_of
from sm121.run.fingerprint import Fingerprint
from sm121.session.session import Session
from sm121.session.settings import Settings


def location_variables() -> tuple[str, ...]:
    """Return the names of variables that only contain a path of a part of the engine."""
    return data_file.load_key("fingerprint.toml", "location_variables", tuple[str, ...])


def sources(record: EnvironmentRecord) -> dict[str, str]:
    """Return versions and commits of the suite, the engine, CUDA, and the packages that compute.

    Args:
        record: The reproducibility record of the engine.

    Returns:
        The versions and commits by name. A suite without a commit has the digest of its files.
    """
    packages = {"cuda": record.cuda_version, **(record.engine_packages.packages or {})}
    found: dict[str, str] = {}
    for name in data_file.load_key("computing-packages.toml", "packages", tuple[str, ...]):
        version = packages.get(name)
        if version:
            found[name] = version
    if record.container is not None and record.container.image_id is not None:
        found["image"] = record.container.image_id
    for name, source in record.git_shas.items():
        found[name] = source.text
        if name == "suite" and not source.sha:
            found[name] = f"{source.text} {_suite()}"
    return found


def fingerprint_of(
    session: Session, record: EnvironmentRecord, variables: Mapping[str, str]
) -> Fingerprint:
    """Return the fingerprint of a run: its settings, its build and its machine.

    Args:
        session: The run. Its engine is known.
        record: The reproducibility record of the engine.
        variables: The environment of the engine's start.
    """
    run = session.run
    settings = session.settings
    chosen = run.profile
    managed = run.configurations.by_name.get(chosen.under_test)
    model: str | None = None
    arguments: list[str] | None = None
    environment: dict[str, str] | None = None
    if run.servers.attached is not None:
        model = f"served:{run.servers.attached.endpoint.served_name}"
    if managed is not None:
        model = identity(managed.model, variables, managed.revision)
        arguments = redact_arguments(managed.arguments, run.record.secrets)
        environment = _shown_environment(session, variables)
    name_and_version = [run.record.file.engine.name, run.record.file.engine.version]
    return Fingerprint(
        profile=profile_digest(chosen),
        profile_shipped=is_shipped(chosen, run.target.engine),
        extends=chosen.extends,
        plan=settings.plan,
        axes=_axes(settings, chosen),
        waivers=_waivers(settings),
        against=settings.judging.against.digest if settings.judging.against is not None else None,
        provider=provider(session),
        options={
            name: run.record.redact(value) for name, value in sorted(settings.options.items())
        },
        sources=sources(record),
        engine=" ".join(part for part in name_and_version if part),
        configuration=chosen.under_test,
        arguments=arguments,
        environment=environment,
        model=model,
        machine=this_machine.identity(host_of(settings.base_url)),
    )


def profile_digest(chosen: profile.Profile) -> str:
    """Return the digest of a profile.

    It depends on the contents of the exam's file, and not on the folder of this file.

    Args:
        chosen: The profile.
    """
    values = chosen.model_dump(mode="json")
    file = Path(chosen.correctness.exam)
    if file.is_file():
        values["correctness"]["exam"] = digest.of_files(file.parent, [file])
    return digest.of_value(values)


def _axes(settings: Settings, chosen: profile.Profile) -> str | None:
    """The digest of the matrix's axes; None for a profile without a matrix."""
    if chosen.matrix is None:
        return None
    loaded = axes.load(settings.matrix.axes or chosen.matrix.axes)
    return digest.of_value(loaded.model_dump(mode="json"))


def _waivers(settings: Settings) -> str | None:
    if not settings.judging.waivers:
        return None
    return digest.of_value([waiver.model_dump(mode="json") for waiver in settings.judging.waivers])


def _shown_environment(session: Session, variables: Mapping[str, str]) -> dict[str, str]:
    """Return a start's environment variables that can affect the engine, without secrets."""
    left_out = location_variables()
    shown = {}
    for name, value in relevant_environment(variables).items():
        if name not in left_out and not is_secret_name(name):
            shown[name] = session.run.record.redact(value)
    return shown


def is_shipped(chosen: profile.Profile, engine: Installed | None = None) -> bool:
    """Whether a profile is unchanged from the one of the same name that the suite ships.

    The choice of the configuration under test does not matter.

    Args:
        chosen: The profile of the run.
        engine: The release and the options of the engine that it judges.
    """
    engine = engine or Installed()
    if chosen.name not in profile.shipped():
        return False
    shipped = profile.load(chosen.name)
    name = chosen.under_test
    if name not in shipped.configurations:
        return False
    choice = (name, engine.identity, engine.options)
    return chosen.judging(*choice) == shipped.judging(*choice)


def provider(session: Session) -> str | None:
    """Return the name of the kernel provider. A provider of the user is named with its digest.

    Args:
        session: The session.

    Returns:
        The provider; None if the numerics test the kernels that the server uses.
    """
    name = session.settings.kernels.provider
    if name is None:
        return None
    module, separator, _ = name.partition(":")
    spec = importlib.util.find_spec(module) if separator else None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return name
    return f"{name} {digest.of_files(Path(spec.origin).parent, [Path(spec.origin)])}"


def _suite() -> str:
    package = Path(str(files("sm121")))
    data = Path(str(files("sm121.fixtures")))
    code = [*package.rglob("*.py"), *package.rglob("*.j2")]
    tables = [*data.rglob("*.toml"), *data.rglob("exams/*.jsonl")]
    return digest.of_value([digest.of_files(package, code), digest.of_files(data, tables)])
