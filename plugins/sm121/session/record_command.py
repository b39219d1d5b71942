"""`sm121 record`: prints the environment record that a run would have, without a run."""

import os
import sys
from dataclasses import dataclass

from sm121.core import architecture
from sm121.core import profile as profiles
from sm121.core.errors import UsageError
from sm121.engines import protocol, registry
from sm121.engines.options import GivenEngine
from sm121.evidence import environment, flashinfer_config, host
from sm121.evidence.environment_record import EnvironmentRecord
from sm121.session import show_config, workload
from sm121.session import target as targets
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings


@dataclass(frozen=True)
class RecordRequest:
    """The arguments of the command.

    Attributes:
        profile: Name or path of the profile; None: that of the architecture.
        configuration: The configuration; None: the one under test.
        engine_python: The interpreter of the engine.
        arguments: More arguments of the engine.
        environment: More environment variables of the engine.
        image_id: The id of the container image; None: the value of the variable SM121_IMAGE_ID.
    """

    profile: str | None = None
    configuration: str | None = None
    engine_python: str = sys.executable
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    image_id: str | None = None


def run(request: RecordRequest) -> EnvironmentRecord:
    """Return the environment record that a run of a configuration would have.

    Args:
        request: The arguments.

    Raises:
        UsageError: The profile or the configuration does not exist.
    """
    name = request.profile or profiles.for_architecture(architecture.detect().name or "unknown")
    chosen = profiles.load(name)
    under_test = request.configuration or chosen.under_test
    if under_test not in chosen.configurations:
        known = ", ".join(chosen.configurations)
        raise UsageError(f"--configuration {under_test}: expected one of {chosen.name}: {known}")
    settings = Settings(
        target=GivenTarget(profile=chosen, configuration=under_test),
        engine=GivenEngine(
            name=chosen.engine.name,
            python=request.engine_python,
            arguments=request.arguments,
            environment=request.environment,
        ),
    )
    # The profile with its settings for this release of the engine.
    chosen = targets.resolve(settings, ()).profile or chosen
    configuration = targets.configurations(settings, chosen, notify=_say_nothing)[under_test]
    variables = {**os.environ, **dict(configuration.environment)}
    if request.image_id is not None:
        variables[host.IMAGE_ID] = request.image_id
    python = configuration.python
    if isinstance(registry.engine(chosen.engine.name), protocol.Program):
        # An engine that is a program has no Python packages, so the suite's packages are recorded.
        python = sys.executable
    record = environment.record(
        python,
        arguments=configuration.arguments,
        environment=variables,
        workload=workload.describe_workload(
            settings, chosen, tokenizer=workload.tokenizer_of(configuration)
        ),
    )
    config = flashinfer_config.run_show_config(python, variables)
    record.engine_packages.flashinfer_config = config.text
    if config.problem:
        record.unknown[show_config.NAME] = config.problem
    return record


def _say_nothing(_line: str) -> None:
    """Print nothing, because standard output is for the record."""
