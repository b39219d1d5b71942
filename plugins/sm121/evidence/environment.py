"""The reproducibility record: the software and the machine of a run.

If a value cannot be determined, it is null, and ``unknown`` contains the reason. The record
implements phase 9 of the benchmark plan (`docs/from-the-plan.md`).
"""

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from sm121.compilation.caches import CompileCaches
from sm121.core import data_file, digest, interpreter
from sm121.core.redaction import redact, redact_arguments, redact_environment, secrets_of
from sm121.evidence import engine_probe, host
from sm121.evidence.environment_record import EnvironmentRecord, PackagesRecord, SourceRecord
from sm121.evidence.git_source import read_checkout

PROBE_TIMEOUT_S = 60.0

#: The names and the name prefixes of the environment variables that are recorded.
_RECORDED = data_file.load_key("recorded-variables.toml", "recorded", dict[str, tuple[str, ...]])
_SHA = re.compile(r"^g?(?P<sha>[0-9a-f]{7,40})$")
#: The hash of a commit in the local part of a version.
_LOCAL_SHA = re.compile(r"\+(?:\w+\.)?g(?P<sha>[0-9a-f]{7,40})\b")
_CUDNN_PACKAGE = re.compile(r"nvidia-cudnn(-cu\d+)?")
#: Distributions that install the package ``flashinfer``.
_FLASHINFER = ("flashinfer-python", "flashinfer")


class _Probe(BaseModel):
    """The answer of `engine_probe`."""

    python: str
    packages: dict[str, str]
    commits: dict[str, str]
    locations: dict[str, str | None]
    versions: dict[str, str | None]
    built_from: dict[str, str | None]
    cuda: str | None


def record(
    engine_python: str,
    *,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    workload: Mapping[str, object],
    root: Path = Path("/"),
) -> EnvironmentRecord:
    """Record the environment of a run that is about to start.

    This starts one subprocess, for at most `PROBE_TIMEOUT_S` seconds, and ``git`` for checkouts.

    Args:
        engine_python: The engine's interpreter.
        arguments: The engine's arguments.
        environment: The engine's environment.
        workload: The requests that will be measured, as JSON.
        root: The folder with ``proc``, ``etc``, ``run`` and ``.dockerenv``.

    Returns:
        The record. Values that cannot be read are null.

    Raises:
        TypeError: `workload` cannot be converted to JSON.
    """
    unknown: dict[str, str] = {}
    secrets = secrets_of(environment)
    probe = _ask_engine(engine_python, environment, unknown)
    reading = host.read_gpus()
    if reading.problem is not None:
        unknown["gpus"] = reading.problem
    packages = dict(sorted(engine_probe.installed()["packages"].items()))
    engine = PackagesRecord()
    if probe is not None:
        engine = PackagesRecord(python=probe.python, packages=probe.packages)
    return EnvironmentRecord(
        git_shas={
            "vllm": _engine_source("vllm", ("vllm",), probe, unknown),
            "flashinfer": _engine_source("flashinfer", _FLASHINFER, probe, unknown),
            "suite": _suite_source(packages, unknown),
        },
        container=host.read_container(environment, root),
        engine_packages=engine,
        suite_packages=PackagesRecord(python=platform.python_version(), packages=packages),
        cuda_version=_cuda_version(probe, environment, unknown),
        driver_version=reading.driver or _driver_version(root, unknown),
        cudnn_version=_cudnn_version(engine.packages or {}, environment, unknown),
        gpus=reading.gpus,
        host=host.read_host(root),
        engine_arguments=redact_arguments(arguments, secrets),
        environment=relevant_environment(environment),
        workload=TypeAdapter(dict[str, JsonValue]).validate_json(
            redact(json.dumps(dict(workload), sort_keys=True), secrets)
        ),
        autotune=autotune_sets(environment),
        unknown=unknown,
    )


def autotune_sets(environment: Mapping[str, str]) -> dict[str, str]:
    """Read the sets of tactics that FlashInfer's autotuner has saved for vLLM.

    Args:
        environment: The engine's environment, which determines the cache's folder.

    Returns:
        For each set, by its folder in the cache, a digest that does not depend on the order of the
        set's entries. The result is empty if no set was saved, for example before the first start.
    """
    named = environment.get("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR")
    root = CompileCaches.of(environment).vllm / "flashinfer_autotune_cache"
    if named:
        root = Path(named).expanduser()
    sets: dict[str, str] = {}
    for file in sorted(root.rglob("autotune_configs.json")):
        text = file.read_text("utf-8", errors="replace")
        try:
            content = json.loads(text)
        except ValueError:
            content = text  # the file is truncated, but must still differ from other files
        sets[str(file.parent.relative_to(root))] = digest.of_value(content)
    return sets


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that affect an engine.

    Args:
        environment: The engine's environment.

    Returns:
        The variables by name, with secrets redacted.
    """
    chosen: dict[str, str] = {}
    for name, value in sorted(environment.items()):
        if name in _RECORDED["names"] or name.startswith(_RECORDED["prefixes"]):
            chosen[name] = value
    return redact_environment(chosen, secrets_of(environment))


def _ask_engine(
    engine_python: str, environment: Mapping[str, str], unknown: dict[str, str]
) -> _Probe | None:
    source = (files("sm121.evidence") / "engine_probe.py").read_text(encoding="utf-8")
    # PYTHONPATH is kept, because it contains the checkouts of the development container.
    variables = {**os.environ, **environment, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        answer = interpreter.ask(engine_python, source, variables, within_s=PROBE_TIMEOUT_S)
        return _Probe.model_validate(answer)
    except interpreter.NoAnswer as error:
        unknown["engine_packages"] = str(error)
    except ValidationError as error:
        problem = f"{engine_python}: unexpected answer with {error.error_count()} errors"
        unknown["engine_packages"] = problem
    return None


def _suite_source(packages: Mapping[str, str], unknown: dict[str, str]) -> SourceRecord:
    source = read_checkout(Path(__file__).resolve())
    if source is None:
        unknown["git_shas.suite"] = "not run from a git checkout"
        source = SourceRecord()
    source.version = packages.get("sm121-conformance")
    return source


def _engine_source(
    name: str, distributions: Sequence[str], probe: _Probe | None, unknown: dict[str, str]
) -> SourceRecord:
    """Return the source of a package in the engine's environment."""
    if probe is None:
        unknown[f"git_shas.{name}"] = "the engine's interpreter did not answer"
        return SourceRecord()
    version = probe.versions.get(name)
    for distribution in distributions:
        version = version or probe.packages.get(distribution)
    location = probe.locations.get(name)
    if location is None and version is None:
        unknown[f"git_shas.{name}"] = "not installed in the engine's environment"
        return SourceRecord()
    if location is not None:
        checkout = read_checkout(Path(location) / "__init__.py")
        if checkout is not None:
            checkout.version = version
            return checkout
    sha = _stated_commit(name, distributions, probe, version)
    if sha is None:
        problem = f"version {version} is installed without a commit in its metadata"
        unknown[f"git_shas.{name}"] = problem
    return SourceRecord(sha=sha, version=version)


def _stated_commit(
    name: str, distributions: Sequence[str], probe: _Probe, version: str | None
) -> str | None:
    """Return the commit in the metadata of a package, or in its version."""
    stated = [probe.commits.get(distribution) for distribution in distributions]
    stated.append(probe.built_from.get(name))
    for text in stated:
        match = _SHA.match(text or "")
        if match is not None:
            return match["sha"]
    match = _LOCAL_SHA.search(version or "")
    return None if match is None else match["sha"]


def _cuda_version(
    probe: _Probe | None, environment: Mapping[str, str], unknown: dict[str, str]
) -> str | None:
    if probe is not None and probe.cuda:
        return probe.cuda
    version = environment.get("CUDA_VERSION")
    if version is None:
        unknown["cuda_version"] = "the engine's torch was built without CUDA, or is not installed"
    return version


def _cudnn_version(
    packages: Mapping[str, str], environment: Mapping[str, str], unknown: dict[str, str]
) -> str | None:
    for name, version in packages.items():
        if _CUDNN_PACKAGE.fullmatch(name):
            return version
    # NGC's images have cuDNN as a system package, and its version in a variable.
    version_of_image = environment.get("CUDNN_VERSION")
    if version_of_image is None:
        unknown["cudnn_version"] = "no nvidia-cudnn package and no CUDNN_VERSION in the environment"
    return version_of_image


def _driver_version(root: Path, unknown: dict[str, str]) -> str | None:
    version = host.read_driver_version(root)
    if version is None:
        problem = "no NVML, and no /proc/driver/nvidia/version"
        if host.has_driver_file(root):
            problem = "no NVML, and no version of a module in /proc/driver/nvidia/version"
        unknown["driver_version"] = problem
    return version
