"""The files in docker/: the compose file is valid by its published schema, and the build context
has the files that pip needs.

No docker runs here.
"""

import copy
import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import jsonschema
import pytest
import yaml

from meta_tests.folders import ROOT
from meta_tests.releases import needs
from sm121.core import profile

DOCKER = ROOT / "docker"
#: github.com/compose-spec/compose-spec, schema/compose-spec.json at 170098b (Apache 2.0).
SCHEMA = json.loads((ROOT / "meta_tests" / "data" / "compose-spec.json").read_text("utf-8"))


@pytest.fixture
def compose() -> dict:
    loaded: dict = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))
    return loaded


def _errors(compose: dict) -> list[str]:
    validator = jsonschema.Draft7Validator(SCHEMA)
    return [f"{'.'.join(map(str, e.path))}: {e.message}" for e in validator.iter_errors(compose)]


def test_the_compose_file_is_of_its_published_schema(compose):
    assert _errors(compose) == []


@pytest.mark.parametrize(
    ("service", "key", "value"),
    [
        pytest.param("asks", "volume", [], id="a key that is none"),
        pytest.param("judges", "gpus", 1, id="gpus as a number"),
        pytest.param("serve", "healthcheck", {"test": 5}, id="a health check that is none"),
    ],
)
def test_a_fault_of_the_compose_file_is_noticed(compose, service, key, value):
    sick = copy.deepcopy(compose)
    sick["services"][service][key] = value
    assert any(line.startswith(f"services.{service}") for line in _errors(sick))


def test_asks_is_small_and_wants_no_gpu(compose):
    """The service `asks` only sends requests, so it needs no image with vLLM (20 GB) and no GPU."""
    asks = compose["services"]["asks"]
    assert re.fullmatch(r"python:3\.\d+-slim", asks["build"]["args"]["IMAGE"])
    assert "gpus" not in asks and asks["network_mode"] == "host"
    assert "--base-url" in asks["command"]


@pytest.mark.parametrize("name", ["dev", "serve"])
def test_checkouts_are_mounted_and_come_first(compose, name):
    service = compose["services"][name]
    mounts = dict(volume.rsplit(":", 1)[::-1] for volume in service["volumes"])
    paths = service["environment"]["PYTHONPATH"].split(":")
    known = profile.load("sm121-gpt-oss-120b").engine.checkouts
    assert paths == [str(known["flashinfer"]), str(known["vllm"])], "test_smoke.py requires these"
    assert {*paths} <= {*mounts}
    assert service["gpus"] == "all" and service["ipc"] == "host"
    assert {"/work", "/root/.cache/huggingface", "/root/.cache/flashinfer"} <= {*mounts}


@pytest.mark.parametrize("name", ["judges", "dev", "serve"])
def test_variables_of_the_engine_are_passed_on(compose, name):
    service = compose["services"][name]
    variables = service["environment"]
    assert variables["FLASHINFER_CUDA_ARCH_LIST"].endswith(":-12.1a}")
    for prefix in ("VLLM_", "FLASHINFER_"):
        passed = []
        for key, value in variables.items():
            if value is None and key.startswith(prefix):
                passed.append(key)
        assert len(passed) >= 4, f"{prefix}* without a value: passed on where they are set"
    assert service["env_file"] == [{"path": "${PWD}/engine.env", "required": False}]


def test_all_services_can_be_interpolated_without_variables(compose):
    """The service `asks` must start without the variables of `dev`."""
    text = json.dumps(compose)
    named = {*re.findall(r"\$\{(\w+)\}", text)}
    assert named <= {"PWD", "HOME"}, "each other variable has a default"


def _context() -> list[Path]:
    """Return the files that .dockerignore leaves in the context."""
    rows = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [row for row in rows if row and not row.startswith("#")]
    assert rules[0] == "*", "what is not named stays out"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    dropped = [rule.removeprefix("**/") for rule in rules[1:] if not rule.startswith("!")]
    files = []
    for name in kept:
        top = ROOT / name
        for path in [top, *top.rglob("*")]:
            if path.is_file() and not _is_dropped(path.relative_to(ROOT), dropped):
                files.append(path)
    return files


def _is_dropped(path: Path, rules: list[str]) -> bool:
    for folder in [path, *path.parents]:
        if any(fnmatch.fnmatch(str(folder), rule) or folder.name == rule for rule in rules):
            return True
    return False


def test_the_context_has_what_pip_needs_and_is_small():
    files = _context()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    for folder in project["tool"]["setuptools"]["package-dir"].values():
        assert any(file.is_relative_to(ROOT / folder) for file in files), folder
    names = {str(file.relative_to(ROOT)) for file in files}
    assert {"pyproject.toml", project["project"]["readme"], "docker/entrypoint.sh"} <= names
    assert not [name for name in names if name.startswith((".venv", ".git", ".cache"))]
    assert sum(file.stat().st_size for file in files) < 50e6


@needs("setuptools", "77", "it cannot read project.license")
def test_the_context_is_enough_for_a_wheel(tmp_path):
    for file in _context():
        target = tmp_path / "context" / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        # The build context contains the link, not its target.
        shutil.copy(file, target, follow_symlinks=False)
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from setuptools import build_meta; "
         "print(build_meta.build_wheel(sys.argv[1]))", str(tmp_path)],
        cwd=tmp_path / "context", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("sm121_conformance-*.whl")
    assert "sm121/fixtures/run.ini" in zipfile.ZipFile(wheel).namelist()


def test_kernels_of_a_release_do_not_run_in_place_of_a_changes():
    """FlashInfer compares only version numbers, so a fork of a release would load the release's
    kernels instead of its own."""
    text = (DOCKER / "Dockerfile.flashinfer").read_text("utf-8")
    assert text.index("uninstall -y flashinfer-jit-cache") < text.rindex("/opt/flashinfer\n")
    assert "ENV FLASHINFER_CUDA_ARCH_LIST=12.1a" in text
