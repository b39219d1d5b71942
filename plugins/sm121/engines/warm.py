"""Compile the FlashInfer modules that a start of the engine would compile (``sm121 warm``)."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from sm121.compilation import jit
from sm121.compilation.caches import CompileCaches
from sm121.compilation.jit import FlashInferModules, JitModule
from sm121.core import errors, unmet
from sm121.core.profile import Profile
from sm121.engines import preflight, registry

_LINE_EVERY_S = 10.0
#: The maximum number of lines of a compiler's output in a message.
_LINES = 12


@dataclass(frozen=True)
class RequiredModules:
    """The FlashInfer modules that an engine may compile, and those that its cache lacks."""

    #: The engine's interpreter.
    python: str
    #: The whole environment of the engine.
    environment: Mapping[str, str]
    modules: FlashInferModules
    needed: tuple[JitModule, ...]
    missing: tuple[JitModule, ...]
    #: Other kernels that are missing in the cache. A start compiles them, but ``sm121 warm`` does
    #: not.
    unbuilt: tuple[jit.Unbuilt, ...]
    #: The keys are the names of modules. The values are the sizes for which XQA is compiled, read
    #: from the arguments of the configuration that needs the module.
    decoding: Mapping[str, jit.Decoding]
    #: The names of the architecture's machine code.
    codes: tuple[str, ...]
    #: The compute capability of the architecture: 121 for 12.1.
    number: int

    @classmethod
    def of(
        cls,
        profile: Profile,
        python: str,
        variables: Mapping[str, str],
        names: Sequence[str] = (),
        configuration: str | None = None,
    ) -> "RequiredModules":
        """Find the modules that a profile's configurations need in the engine's release.

        The configurations are the configuration under test and the baseline. If both need a module
        of the same name, the module of the configuration under test is used.

        Args:
            profile: The profile.
            python: The engine's interpreter.
            variables: Environment variables to add to the engine's environment.
            names: The modules to return; empty for all.
            configuration: The configuration under test (default: the profile's).

        Raises:
            UsageError: The profile needs no module, or a name is unknown.
            NoAnswer: The interpreter does not answer.
        """
        architecture = _architecture_of(profile)
        target = {"FLASHINFER_CUDA_ARCH_LIST": f"{architecture.target}a"}
        environment = {**target, **os.environ, **profile.engine.environment, **variables}
        engine = registry.installed(registry.engine(profile.engine.name), python, environment)
        chosen = profile.judging(configuration, engine.identity, engine.options)
        modules = FlashInferModules.of(python, environment)
        by_name: dict[str, JitModule] = {}
        decoding: dict[str, jit.Decoding] = {}
        of_configurations: list[tuple[str, ...]] = []
        for name in (chosen.baseline, chosen.under_test):
            judged = chosen.configurations[name]
            arguments = (*chosen.engine.arguments, *judged.arguments)
            of_configurations.append(arguments)
            own_environment = {**environment, **judged.environment, **variables}
            needs = profile.engine.needs
            for module in jit.needed(needs, arguments, own_environment, modules.version):
                _add_module(by_name, module, modules.version)
                decoding[module.name] = jit.Decoding.of(arguments)
        strange = sorted(set(names) - set(by_name))
        if strange:
            raise errors.UsageError(f"module {strange[0]}: expected one of {', '.join(by_name)}")
        needed = [by_name[name] for name in names or by_name]
        codes = architecture.codes
        missing = modules.missing(needed, codes, architecture.number)
        return cls(
            python=python,
            environment=environment,
            modules=modules,
            needed=tuple(needed),
            missing=tuple(missing),
            unbuilt=modules.unbuilt(of_configurations, codes),
            decoding=decoding,
            codes=codes,
            number=architecture.number,
        )

    def jobs(self, module: JitModule) -> str:
        """Return the number of compile jobs that run in parallel.

        The number is MAX_JOBS of the environment. If it is not set, it is the number for which the
        memory is sufficient while no server runs; "0" if the memory is not sufficient for one job.

        Args:
            module: The module to compile.
        """
        limit = self.environment.get("MAX_JOBS", "")
        return limit or str(jit.bound([module], self.environment).jobs)

    def obstacle(self, module: JitModule) -> str | None:
        """Return why a module cannot be compiled on this machine; None if it can.

        Args:
            module: The module.
        """
        lacking = preflight.lacking_tools(self.environment)
        if lacking:
            return (
                f"there is no {' and no '.join(lacking)}; set CUDA_HOME to a CUDA toolkit and put "
                "ninja on PATH"
            )
        if not self.modules.installed:
            return f"{self.python} has no flashinfer-python"
        bound = jit.bound([module], self.environment)
        limit = self.environment.get("MAX_JOBS")
        if not bound.jobs:
            return f"{bound}; stop other processes that use memory"
        if limit and not (limit.isdecimal() and 0 < int(limit) <= bound.fitting):
            return (
                f"MAX_JOBS: expected at most {bound.fitting}, got {limit}. "
                f"Give --engine-env MAX_JOBS={bound.jobs}"
            )
        return None

    def build(self, module: JitModule, say: Callable[[str], None]) -> str | None:
        """Compile a module of `missing` into FlashInfer's cache.

        Args:
            module: The module.
            say: Prints a progress line; called now and then.

        Returns:
            The error, with the end of the compiler's output; None if the module is in the cache.
        """
        variables = {
            **self.environment,
            "MAX_JOBS": self.jobs(module),
            "FLASHINFER_NVCC_THREADS": self.environment.get("FLASHINFER_NVCC_THREADS") or "1",
        }
        status, lines = self._compile(module, variables, say)
        if status != 0:
            return "\n    ".join([f"status {status}", *lines[-_LINES:]])
        library = Path(json.loads(lines[-1])["library"])
        if self.modules.missing([module], self.codes, self.number):
            return str(unmet.Fact(f"{module.module} for {', '.join(self.codes)}", f"{library}"))
        return None

    def _compile(
        self, module: JitModule, variables: Mapping[str, str], say: Callable[[str], None]
    ) -> tuple[int, list[str]]:
        """Return the exit status of the compiling process, and the lines of its output."""
        caches = CompileCaches.of(variables)
        began = time.time()
        shape = dataclasses.asdict(self.decoding[module.name])
        request = json.dumps({"ask": "build", "module": module.name, **shape})
        with (
            as_file(files("sm121.compilation") / "in_flashinfer" / "sm121_units.py") as script,
            tempfile.TemporaryFile("w+", errors="replace") as output,
        ):
            process = subprocess.Popen(
                [self.python, str(script), request],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that nvcc's own processes can be ended as a group
            )
            try:
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_LINE_EVERY_S)
                        break
                    say(f"building {caches.building(began) or module.name}")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            lines = output.read().strip().splitlines()
        return process.returncode, lines


def _architecture_of(profile: Profile) -> preflight.Architecture:
    for architecture in preflight.load_preflight().architecture:
        if architecture.name == profile.arch and profile.engine.needs.jit_modules:
            return architecture
    raise errors.UsageError(
        f"profile {profile.name}: expected engine.needs.jit_modules and the architecture of "
        "a GPU, got a profile that needs no module of FlashInfer. Choose another with --profile"
    )


def _add_module(by_name: dict[str, JitModule], module: JitModule, version: str | None) -> None:
    """Add a module, and remove the modules that it replaces in a release of FlashInfer."""
    for other in list(by_name.values()):
        if module.displaces(other, version):
            del by_name[other.name]
    by_name[module.name] = module
