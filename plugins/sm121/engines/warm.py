"""Compiling what an engine's start would compile, without a server: ``sm121 warm``."""

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
#: What is shown of a compiler's output.
_LINES = 12


@dataclass(frozen=True)
class Warmth:
    """What of FlashInfer an engine may compile, and what of it is missing in its cache."""

    python: str
    environment: Mapping[str, str]
    modules: FlashInferModules
    needed: tuple[JitModule, ...]
    missing: tuple[JitModule, ...]
    #: Of what a start compiles beside them, what is not in the cache: it is not compiled here.
    unbuilt: tuple[jit.Unbuilt, ...]
    #: By module: of the configuration that needs it.
    decoding: Mapping[str, jit.Decoding]
    #: Of the architecture: names of its machine code, and its compute capability.
    codes: tuple[str, ...]
    number: int

    @classmethod
    def of(
        cls,
        profile: Profile,
        python: str,
        variables: Mapping[str, str],
        names: Sequence[str] = (),
        configuration: str | None = None,
    ) -> "Warmth":
        """Of a profile's configurations in the engine's release: the one under test and the
        baseline, of which only the first where FlashInfer has one name for what both compile.
        `python`: the engine's; `variables`: added to its environment; `names`: only these
        modules; `configuration`: the one under test (default: the profile's). Raises UsageError:
        nothing is compiled, or a name is not known; NoAnswer: the interpreter does not answer."""
        architectures = {item.name: item for item in preflight.load_preflight().architecture}
        if not profile.engine.needs.jit_modules or profile.arch not in architectures:
            raise errors.UsageError(
                f"profile {profile.name}: nothing of FlashInfer is compiled for it (expected "
                "engine.needs.jit_modules and a GPU's architecture); --profile names another one"
            )
        architecture = architectures[profile.arch]
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
            its_environment = {**environment, **judged.environment, **variables}
            for module in jit.needed(
                profile.engine.needs, arguments, its_environment, modules.version
            ):
                others = [o for o in by_name.values() if module.displaces(o, modules.version)]
                for other in others:
                    del by_name[other.name]
                by_name[module.name] = module
                decoding[module.name] = jit.Decoding.of(arguments)
            of_configurations.append(arguments)
        if strange := sorted(set(names) - set(by_name)):
            raise errors.UsageError(f"module {strange[0]}: expected one of {', '.join(by_name)}")
        needed = [by_name[name] for name in names or by_name]
        codes, number = architecture.codes, architecture.number
        missing = modules.missing(needed, codes, number)
        return cls(
            python=python,
            environment=environment,
            modules=modules,
            needed=tuple(needed),
            missing=tuple(missing),
            unbuilt=modules.unbuilt(of_configurations, codes),
            decoding=decoding,
            codes=codes,
            number=number,
        )

    def jobs(self, module: JitModule) -> str:
        """How many compile jobs at a time: what the environment says, else what fits without a
        server; "0" where none does."""
        limit = self.environment.get("MAX_JOBS", "")
        return limit or str(jit.bound([module], self.environment).jobs)

    def obstacle(self, module: JitModule) -> str | None:
        """Why a module cannot be compiled here; None when it can."""
        lacking = preflight.lacking_tools(self.environment)
        if lacking:
            return (
                f"there is no {' and no '.join(lacking)}; set CUDA_HOME to a CUDA toolkit and put "
                "ninja on PATH"
            )
        if not self.modules.installed:
            return f"{self.python} has no flashinfer-python"
        bound, limit = jit.bound([module], self.environment), self.environment.get("MAX_JOBS")
        if not bound.jobs:
            return f"{bound}; stop what holds memory"
        if limit and not (limit.isdecimal() and 0 < int(limit) <= bound.jobs):
            return f"MAX_JOBS={limit}, {bound.jobs} fit: give --engine-env MAX_JOBS={bound.jobs}"
        return None

    def build(self, module: JitModule, say: Callable[[str], None]) -> str | None:
        """Compile a module of `missing` into FlashInfer's cache. `say`: shows progress. Returns:
        what went wrong, with the end of the compiler's output; None when it is there."""
        variables = {
            **self.environment,
            "MAX_JOBS": self.jobs(module),
            "FLASHINFER_NVCC_THREADS": self.environment.get("FLASHINFER_NVCC_THREADS") or "1",
        }
        caches, began = CompileCaches.of(variables), time.time()
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
                start_new_session=True,  # nvcc starts others: all of them end with the group
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
        if process.returncode != 0:
            return "\n    ".join([f"status {process.returncode}", *lines[-_LINES:]])
        library = Path(json.loads(lines[-1])["library"])
        if self.modules.missing([module], self.codes, self.number):
            return str(unmet.Fact(f"{module.module} for {', '.join(self.codes)}", f"{library}"))
        return None
