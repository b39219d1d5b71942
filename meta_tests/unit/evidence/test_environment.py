"""The reproducibility record is complete, contains no guesses, and contains no secret."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meta_tests.fakes.servers import git
from sm121.core import interpreter, redaction
from sm121.core.redaction import (
    REDACTED,
    is_secret_name,
    redact,
    redact_arguments,
    redact_environment,
    secrets_of,
)
from sm121.evidence import environment
from sm121.evidence.environment_record import EnvironmentRecord
from sm121.evidence.host import NvmlReading, read_container, read_host

TOKEN = "hf_" + "a1B2" * 8


def run_record(python: str = sys.executable, **changes: Any) -> EnvironmentRecord:
    workload = {"prompt_tokens": 2048}
    usual = {"arguments": ["--model", "m"], "environment": {}, "workload": workload}
    return environment.record(python, **(usual | changes))


@pytest.fixture
def engine(tmp_path: Path) -> dict[str, str]:
    """An engine's environment on PYTHONPATH, as in the development container.

    It has no package metadata."""
    for name, file, text in (
        (
            "vllm",
            "_version.py",
            (
                "__version__ = version = '0.33.1.dev7+g0123abcde'\n"
                "__commit_id__ = commit_id = None\n"
            ),
        ),
        (
            "flashinfer",
            "_build_meta.py",
            (
                '__version__ = "0.7.2"\n'
                '__git_version__ = "cccccccccccccccccccccccccccccccccccccccc"\n'
            ),
        ),
        ("torch", "version.py", ("from typing import Optional\ncuda: Optional[str] = '13.0'\n")),
    ):
        package = tmp_path / "site" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise SystemExit('the probe must not import this')")
        (package / file).write_text(text, encoding="utf-8")
    return {"PYTHONPATH": str(tmp_path / "site")}


def test_versions_are_read_without_importing(engine):
    record = run_record(environment=engine)
    assert record.git_shas["vllm"].sha == "0123abcde"  # read from the local part of the version
    assert record.git_shas["vllm"].version == "0.33.1.dev7+g0123abcde"
    assert record.git_shas["vllm"].dirty is None
    assert record.git_shas["flashinfer"].sha == "c" * 40
    assert record.cuda_version == "13.0"
    assert record.engine_packages.python is not None
    assert "pytest" in (record.suite_packages.packages or {})


def test_checkout_gives_commit_and_dirtiness(engine):
    site = Path(engine["PYTHONPATH"])
    for command in (("init",), ("add", "."), ("commit", "-m", "x")):
        git(site, *command)
    sha = git(site, "rev-parse", "HEAD")
    for is_dirty in (False, True):
        source = run_record(environment=engine).git_shas["vllm"]
        assert (source.sha, source.dirty) == (sha, is_dirty)
        (site / "vllm" / "_version.py").write_text("__version__ = '1'\n")


def test_foreign_checkout_around_the_environment_is_not_the_engines(engine):
    """The commit of a checkout that contains the engine's environment is not taken for the
    engine's.

    The virtual environment is inside another project's checkout."""
    site = Path(engine["PYTHONPATH"])
    (site / ".gitignore").write_text("vllm/\n")
    for command in (("init",), ("add", ".gitignore"), ("commit", "-m", "x")):
        git(site, *command)
    source = run_record(environment=engine).git_shas["vllm"]
    assert (source.sha, source.dirty) == ("0123abcde", None)


@pytest.mark.parametrize("python", ["/nowhere/bin/python", "false"])
def test_engine_that_does_not_answer_is_null_with_a_reason(python):
    record = run_record(python)
    assert record.engine_packages.packages is None
    assert record.git_shas["vllm"].sha is None
    assert python in record.unknown["engine_packages"]


def test_an_engine_may_hang_or_chatter(monkeypatch, tmp_path):
    """If the engine hangs, the value is null, and the record contains the reason.

    Lines before the answer are ignored."""
    site = tmp_path / "sitecustomize.py"
    path = {"PYTHONPATH": str(tmp_path)}
    site.write_text("print('hello')")
    assert run_record(environment=path).engine_packages.packages is not None
    site.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(environment, "PROBE_TIMEOUT_S", 0.3)
    assert "within 0.3 s" in run_record(environment=path).unknown["engine_packages"]


def test_missing_package_is_null_with_a_reason():
    record = run_record()
    for name, source in record.git_shas.items():
        assert source.sha is not None or f"git_shas.{name}" in record.unknown
    for field in ("cuda_version", "cudnn_version", "driver_version", "gpus"):
        assert getattr(record, field) is not None or field in record.unknown


OF_A_SPARK = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (dvs)\n"
    "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2)\n"
)
NO_VERSION = "no NVML, and no version of a module in /proc/driver/nvidia/version"


@pytest.mark.parametrize(
    ("text", "version", "reason"),
    [
        (OF_A_SPARK, "580.95.05", None),
        (None, None, "no NVML, and no /proc/driver/nvidia/version"),
        ("", None, NO_VERSION),
        ("NVRM: nvgpu\n", None, NO_VERSION),
    ],
    ids=["a Spark's", "no file", "an empty file", "a file without a version"],
)
def test_the_driver_without_nvml(text, version, reason, monkeypatch, tmp_path):
    monkeypatch.setattr(environment.host, "read_gpus", lambda: NvmlReading(problem="no NVML"))
    if text is not None:
        file = tmp_path / "proc" / "driver" / "nvidia" / "version"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    record = run_record(root=tmp_path)
    assert record.driver_version == version
    assert record.unknown.get("driver_version") == reason


def test_record_is_json_and_keeps_the_workload():
    workload = {"prompt_tokens": 2048, "generated_tokens": [32, 128], "note": None}
    record = run_record(workload=workload)
    text = record.model_dump_json()
    assert EnvironmentRecord.model_validate_json(text) == record
    assert json.loads(text)["workload"] == workload
    with pytest.raises(TypeError):
        run_record(workload={"x": object()})


def test_no_secret_reaches_the_record():
    secret = "Tr0ub4dor"
    variables = {"HF_TOKEN": TOKEN, "VLLM_API_KEY": secret, "VLLM_X": f"see {secret}"}
    record = run_record(
        arguments=["--api-key", secret, "--model", "https://user:pw123@example.org/m",
                   f"--hf-token={TOKEN}"],
        environment={**variables, "VLLM_USE_V1": "1", "HOME": "/h"},
        workload={"note": f"key {secret}"},
    )  # fmt: skip
    text = record.model_dump_json()
    assert not [part for part in (secret, TOKEN, "pw123") if part in text]
    assert record.environment["VLLM_USE_V1"] == "1" and "HOME" not in record.environment


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "token hf_a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2 was refused",
            id="token hf_a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2 was refused",
        ),
        "Authorization: Bearer abcdef123456",
        "'Authorization': 'Bearer abcdef123456'",
        "key sk-abcdefABCDEF0123456789",
        "https://user:hunter22@example.org/x",
        "OPENAI_API_KEY=hunter2222",
        "'api_key': ['hunter2222']",
        "--api-key hunter2222",
        "nvapi-abcdefABCDEF0123456789",
        "AWS_SECRET_ACCESS_KEY=hunter2222",
        "OPENAI_KEY=hunter2222",
        "x-api-key: hunter2222",
        pytest.param(
            "['vllm', '--api-key', 'hunter2222', '--port', '1']",
            id="('vllm', '--api-key', 'hunter2222', '--port', '1')",
        ),
        "--hf-token=hunter2222",
        "api_key=['hunter2222', 'hunter2223']",
        "Authorization: hunter2222",
        "{'Authorization': 'Digest hunter2222'}",
        "api_org_abcdefABCDEF0123456789",
        "https://user:pass@hunter22@example.org/x",
    ],
)
def test_what_looks_like_a_secret_is_blanked(text):
    assert REDACTED in redact(text)
    assert not [secret for secret in (TOKEN, "abcdef", "hunter2") if secret in redact(text)]


@pytest.mark.parametrize(
    "text",
    [
        "hf_overrides=None, hf_config_path=None",
        "max_tokens=128, max_num_batched_tokens=8192",
        "api_key=None",
        "tokenizer='openai/gpt-oss-120b'",
        "http://127.0.0.1:8000/v1/chat/completions",
        pytest.param(
            (
                "AWS_SECRET_ACCESS_KEY=[redacted] api_key=[redacted] Authorization: Bearer "
                "[redacted]"
            ),
            id="AWS_SECRET_ACCESS_KEY=(redacted) api_key=(redacted)",
        ),
        pytest.param(
            "['--tokenizer', 'openai/gpt-oss-120b', '--max-tokens', '128']",
            id="('--tokenizer', 'openai/gpt-oss-120b', '--max-tokens'",
        ),
        pytest.param(
            "cache_key='abcdef', key=abcdef, token_ids=[1, 2, 3]",
            id="cache_key='abcdef', key=abcdef, token_ids=(1, 2, 3)",
        ),
        pytest.param(
            "http://127.0.0.1:8000/v1/models, user@example.org",
            id="http://127.0.0.1:8000/v1/models, user@example.org",
        ),
        "Using 'MARLIN' Mxfp4 MoE backend.",
    ],
)
def test_texts_without_a_secret_stay(text):
    assert redact(text) == text


def test_a_log_is_redacted_in_place_and_else_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(redaction, "_CHUNK_BYTES", 1000)
    log = tmp_path / "server.log"
    other = tmp_path / "linked.log"
    lines = [b"step %d of the engine, \xff\n" % n for n in range(2000)]
    log.write_bytes(b"".join(lines))
    stamp = log.stat().st_mtime_ns
    other.hardlink_to(log)
    assert not redaction.redact_file(log, {"hunter2222"}) and log.stat().st_mtime_ns == stamp
    lines[1500] = b"non-default args: {'api_key': ['first-of-them', 'second-of-them']}\n"
    lines[1700] = b"said hunter2222 to whoever asked\n"
    log.write_bytes(b"".join(lines))
    assert redaction.redact_file(log, {"hunter2222"})
    lines[1500] = b"non-default args: {'api_key': [redacted]}\n"
    lines[1700] = b"said [redacted] to whoever asked\n"
    assert other.read_bytes() == b"".join(lines)
    assert {path.name for path in tmp_path.iterdir()} == {"linked.log", "server.log"}


def test_secrets_are_known_by_their_names_and_blanked_longest_first():
    variables = {"MY_KEY": "1", "HF_TOKEN": "true", "API_KEY": "hunter2222"}
    assert secrets_of(variables) == {"hunter2222"}, "a short value is none"
    assert redact("abcdefgh abcd", ["abcd", "abcdefgh", ""]) == f"{REDACTED} {REDACTED}"
    assert redact("a cat sat: a", ["a"]) == f"{REDACTED} cat sat: {REDACTED}"
    secret = ("HF_TOKEN", "VLLM_API_KEY", "--api-key", "DB_PASSWORD", "AWS_SECRET")
    harmless = ("VLLM_MAX_TOKENS", "TOKENIZERS_PARALLELISM", "MONKEY", "VLLM_KEYS")
    assert [*filter(is_secret_name, secret + harmless)] == [*secret]
    assert redact_environment({"HF_TOKEN": "", "A": "x"}) == {"HF_TOKEN": "", "A": "x"}
    assert redact_arguments(["--api-key", "--model", "m"]) == ["--api-key", "--model", "m"]


def test_container_marks(tmp_path):
    assert read_container({}, tmp_path) is None
    (tmp_path / ".dockerenv").touch()
    build = {"NVIDIA_BUILD_ID": "42", "PYTORCH_VERSION": "2.10"}
    docker = read_container(build, tmp_path)
    assert (docker.runtime, docker.image, docker.build) == ("docker", None, build)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".containerenv").write_text('image="nvcr.io/x:1"\nimageid="abc"\n')
    podman = read_container({}, tmp_path)
    assert (podman.runtime, podman.image, podman.image_id) == ("podman", "nvcr.io/x:1", "abc")


def test_host_of_an_arm_machine(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(
        "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd85\n\n"
        "processor\t: 1\nCPU part\t: 0xd87\n"
    )
    host = read_host(tmp_path)
    assert host.cpu_model == "ARM implementer 0x41 part 0xd85, 0xd87"
    assert host.os is None and host.memory_bytes > 0


class FakeNvml(SimpleNamespace):
    """NVML with the answers of a GB10, of which many are "not supported"."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": False,
            "nvmlShutdown": False,
            "nvmlSystemGetDriverVersion": "580.95.05",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetName": "NVIDIA GB10",
            "nvmlDeviceGetCudaComputeCapability": (12, 1),
            "nvmlDeviceGetApplicationsClock": 2000,
            "nvmlDeviceGetDefaultApplicationsClock": 2400,
        }

        def call(*_: object) -> Any:
            if name not in answers:
                raise self.NVMLError("Not Supported")
            return answers[name] or None

        return call


def test_gpu_that_does_not_answer_everything(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    record = run_record()
    assert record.driver_version == "580.95.05"
    (gpu,) = record.gpus
    assert (gpu.name, gpu.compute_capability, gpu.clocks) == ("NVIDIA GB10", "12.1", "locked")
    silent = (gpu.power_mode, gpu.power_limit_w, gpu.memory_total_bytes, gpu.persistence)
    assert silent == (None,) * 4


class Layout:
    """An environment with a vLLM, and the working directory of a container."""

    def __init__(self, root: Path) -> None:
        env = root / "env"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
        self.python = str(env / "bin" / "python")
        (self.packages,) = env.glob("lib/python3*/site-packages")
        self.work = root / "workspace" / "vllm"
        self.work.mkdir(parents=True)

    @staticmethod
    def package(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()

    def wrong(self, checkout: Path | None = None, **variables: str) -> list[str]:
        names = ("vllm", "flashinfer")
        checkouts = {"vllm": str(checkout)} if checkout else {}
        imports = interpreter.imports(self.python, names, {"PATH": "", **variables})
        return interpreter.misplaced(imports, checkouts)


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    made = Layout(tmp_path)
    monkeypatch.chdir(made.work)
    return made


def test_a_folder_of_the_packages_name_is_no_checkout(layout):
    """A folder with the name of the package does not count as a checkout.

    eugr's images work in /workspace/vllm, which contains no vLLM; their vLLM is installed."""
    layout.package(layout.packages / "vllm")
    assert layout.wrong(layout.work) == []
    # The folder is now a checkout, and vLLM must be imported from there.
    layout.package(layout.work / "vllm")
    assert layout.wrong(layout.work) == []
    os.chdir("/")
    (line,) = layout.wrong(layout.work)
    assert "expected the one of the checkout" in line


def test_an_editable_install_is_an_install(layout, tmp_path):
    """An editable install counts as installed.

    It is found by a path file, as setuptools and uv write it, and by a finder."""
    layout.package(tmp_path / "source" / "vllm")
    layout.package(tmp_path / "other" / "flashinfer")
    (layout.packages / "vllm.pth").write_text(f"{tmp_path}/source\n")
    (layout.packages / "finder.pth").write_text(f"import sys; sys.path.append('{tmp_path}/other')")
    assert layout.wrong() == []
    assert layout.wrong(layout.work) == []
    assert layout.wrong(PYTHONPATH=f"{tmp_path}/source") == [], "it is named twice"


def test_packages_found_by_pythonpath_or_working_directory_are_misplaced(layout, tmp_path):
    layout.package(layout.packages / "vllm")
    layout.package(tmp_path / "elsewhere" / "vllm")
    (line,) = layout.wrong(PYTHONPATH=f"{tmp_path}/elsewhere")
    assert f"expected {layout.packages}/vllm" in line and "elsewhere/vllm" in line
    layout.package(layout.work / "flashinfer")
    (line,) = layout.wrong()
    assert "flashinfer: expected an installed package (there is none)" in line
