"""The server configurations of a run's profile, and the reasons why one cannot start here."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sm121.compilation import jit
from sm121.core.configuration import ServerConfiguration
from sm121.core.server import Node
from sm121.core.verdict import NotRun
from sm121.engines import registry
from sm121.engines.preflight import PreflightFinding
from sm121.run import start_checks
from sm121.run.record import RunRecord, Target


@dataclass(kw_only=True)
class Configurations:
    """The server configurations that the suite can start itself."""

    target: Target
    record: RunRecord
    #: The profile's configurations; empty if the server is attached.
    by_name: Mapping[str, ServerConfiguration] = field(default_factory=dict, init=False)
    #: The facts about each node, collected before the first start.
    node_facts: Mapping[Node, Mapping[str, Any]] = field(default_factory=dict, init=False)

    def begin(
        self,
        by_name: Mapping[str, ServerConfiguration],
        node_facts: Mapping[Node, Mapping[str, Any]],
    ) -> None:
        """Set the configurations that the suite can start.

        Args:
            by_name: The profile's configurations.
            node_facts: The facts about each node, this machine first; empty without other nodes.
        """
        self.by_name = by_name
        self.node_facts = node_facts

    def managed(self, name: str) -> ServerConfiguration:
        """Return a configuration that the suite starts itself.

        Args:
            name: The configuration's name in the profile.

        Raises:
            NotRun: This machine cannot judge the target, or the server is attached.
        """
        if self.target.obstacle is not None:
            raise NotRun(self.target.obstacle)
        if name not in self.by_name:
            raise NotRun("the arguments of the attached server are unknown")
        return self.by_name[name]

    def environment(self, configuration: ServerConfiguration) -> Mapping[str, str]:
        """Return the environment of a configuration's engine.

        Args:
            configuration: The configuration. Its engine must be one that the suite can start.

        Returns:
            The whole environment of the engine's process, with an empty API key.

        Raises:
            UsageError: The suite cannot start this engine.
        """
        return registry.engine(configuration.engine).environment(configuration, api_key="")

    def bound_compilers(self, configuration: ServerConfiguration) -> Mapping[str, str]:
        """Return the variables that limit parallel compilers so that they fit in memory.

        If there are any, the report gets a remark that names them.

        Args:
            configuration: The configuration whose engine may compile kernels when it starts.

        Returns:
            The variables to add to the engine's environment; empty if the start compiles nothing,
            or if the user has set these variables.

        Raises:
            UsageError: The profile names an unknown module of kernels.
        """
        added = jit.bounding_variables(
            self.target.require_profile().engine.needs,
            configuration.arguments,
            self.environment(configuration),
        )
        if added:
            variables = ", ".join(f"{name}={value}" for name, value in added.items())
            self.record.remark(
                f"server {configuration.name} is started with {variables}", at_once=False
            )
        return added

    @functools.cached_property
    def findings(self) -> list[PreflightFinding]:
        """The reasons why a server cannot start here; computed once, before the first start."""
        names = (self.target.require_profile().under_test, self.target.require_profile().baseline)
        findings = start_checks.find_obstacles(
            self.target.arch,
            self.target.require_profile().engine,
            [self.managed(name) for name in names],
            self.environment,
            directory=self.record.directory,
            version=self.record.file.engine.identity,
            node_facts=self.node_facts,
        )
        for finding in findings:
            if finding.severity == "note":
                self.record.remark(finding.message, at_once=False)
            else:
                self.record.remark(f"{finding.severity}: {finding.message}")
        return findings
