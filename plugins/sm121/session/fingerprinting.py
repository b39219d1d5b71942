"""The fingerprint of a session, from what was asked for and what was found."""

import importlib.util
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from sm121.checkpoint.identity import identity
from sm121.core import data_file, digest, profile
from sm121.core.redaction import is_secret_name, redact_arguments
from sm121.engines.registry import Installed
from sm121.evidence import environment
from sm121.evidence.environment_record import EnvironmentRecord
from sm121.matrix import axes
from sm121.measure import machine
from sm121.performance.recorder import host_of
from sm121.run.fingerprint import Fingerprint
from sm121.session.session import Session


def location_variables() -> tuple[str, ...]:
    """Variables that say where something of an engine lies, not what is run."""
    return data_file.load_key("fingerprint.toml", "location_variables", tuple[str, ...])


def sources(record: EnvironmentRecord) -> dict[str, str]:
    """Versions and commits of what runs, and of CUDA and the packages that compute, by name."""
    packages = {"cuda": record.cuda_version, **(record.engine_packages.packages or {})}
    names = data_file.load_key("computing-packages.toml", "packages", tuple[str, ...])
    found = {name: version for name in names if (version := packages.get(name))}
    if record.container is not None and record.container.image_id is not None:
        found["image"] = record.container.image_id
    return found | {
        name: source.text if name != "suite" or source.sha else f"{source.text} {_suite()}"
        for name, source in record.git_shas.items()
    }


def of(session: Session, record: EnvironmentRecord, variables: Mapping[str, str]) -> Fingerprint:
    """What a session asks, of what, on which machine. ``variables``: of the engine's start."""
    settings = session.settings
    chosen = session.profile
    managed = session.configurations.get(chosen.under_test)
    attached = session.attached
    served = f"served:{attached.endpoint.served_name}" if attached is not None else None
    relevant = environment.relevant_environment(variables)
    left_out = location_variables()
    return Fingerprint(
        profile=digest.of(chosen.model_dump(mode="json")),
        profile_shipped=is_shipped(chosen, session.target.engine),
        extends=chosen.extends,
        plan=settings.plan,
        axes=None
        if chosen.matrix is None
        else digest.of(axes.load(settings.axes or chosen.matrix.axes).model_dump(mode="json")),
        waivers=digest.of([waiver.model_dump(mode="json") for waiver in settings.waivers])
        if settings.waivers
        else None,
        against=settings.against.digest if settings.against is not None else None,
        provider=provider(session),
        options={name: session.redact(value) for name, value in sorted(settings.options.items())},
        sources=sources(record),
        engine=" ".join(filter(None, (session.file.engine.name, session.file.engine.version))),
        configuration=chosen.under_test,
        arguments=redact_arguments(managed.arguments, session.secrets) if managed else None,
        environment={
            name: session.redact(value)
            for name, value in relevant.items()
            if name not in left_out and not is_secret_name(name)
        }
        if managed
        else None,
        model=identity(managed.model, variables) if managed else served,
        machine=machine.identity(host_of(settings.base_url)),
    )


def is_shipped(chosen: profile.Profile, engine: Installed | None = None) -> bool:
    """Whether a profile is the one of its name that comes with the suite, whichever of its
    configurations is judged, of whichever engine."""
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
    """The kernel provider that was asked for; of a user's own with the digest of its module. None
    where the numerics judge what serves."""
    name = session.settings.kernel_provider
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
    return digest.of([digest.of_files(package, code), digest.of_files(data, tables)])
