"""A simulated GB10, which answers every query of the suite as a GB10 would.

A `Machine` runs the suite as its owner does. It has a library with NVML's answers (``nvml.c``), an
interpreter whose vLLM has the given release (``server.py``), constructed measurements of a healthy
box, and a real vLLM on the CPU that generates the answers.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meta_tests.fakes import fat_binaries
from meta_tests.fakes.installed import dist_info
from meta_tests.folders import ROOT
from sm121.engines.ports import free_port
from tools.choices import data

HERE = Path(__file__).parent
MODEL = "gpt-oss-120b"
#: The name of the MXFP4 build, which is used in place of a release.
BUILD = "mxfp4"
PROFILE = HERE / "profile.toml"

#: Libraries of vLLM's wheel with device code. Nothing on the simulated machine imports them.
LIBRARIES = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so")

#: A healthy machine: its device, its state, its rates, and FlashInfer's compiled modules. Device,
#: state and rates are names of files.
HEALTHY_ONE: dict[str, Any] = tomllib.loads((HERE / "healthy.toml").read_text("utf-8"))


@dataclass
class Behind:
    """The vLLM on the CPU that generates the answers."""

    url: str
    key: str


@contextlib.contextmanager
def vllm_on_the_cpu(checkpoint: Path, log: Path) -> Iterator[Behind]:
    """Start vLLM, wait until it is ready, and stop it at the end of the block."""
    port = free_port()
    key = secrets.token_hex(16)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint),
        "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", "4608", "--max-num-seqs", "8", "--enforce-eager",
        "--num-gpu-blocks-override", "640", "--enable-auto-tool-choice",
        "--tool-call-parser", "openai",
    ]  # fmt: skip
    environment = {
        **os.environ, "VLLM_API_KEY": key, "VLLM_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, process, log)
            yield Behind(url, key)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # otherwise the run's engine would remain
                process.wait()


def _wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 900
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.3)


@dataclass
class Machine:
    """A simulated machine in a folder of its own."""

    folder: Path
    release: str
    behind: Behind
    profile: Path = PROFILE
    rates: dict[str, Any] = field(default_factory=lambda: dict(HEALTHY_ONE["rates"]))
    device: dict[str, Any] = field(default_factory=lambda: dict(HEALTHY_ONE["device"]))
    state: dict[str, int] = field(default_factory=lambda: dict(HEALTHY_ONE["state"]))
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    #: The version of a build; None for a release.
    version: str | None = None
    #: The version of FlashInfer. If None, it is the version that the release requires.
    flashinfer: str | None = None
    warm: Sequence[str] = tuple(HEALTHY_ONE["warm"])
    #: Whether one server spans this machine and another one.
    two: bool = False
    #: The drafter of speculative decoding in the hub's cache; empty for none.
    drafter: str = ""
    #: The architecture of the machine code in vLLM's libraries.
    code: str = "121a"
    #: Lines of dmesg. They appear a moment after the start.
    kernel_log: str = ""

    @property
    def python(self) -> Path:
        """The engine's interpreter."""
        return self.folder / "engine" / "bin" / "python"

    @property
    def report(self) -> Path:
        return self.folder / "report"

    def build(self) -> None:
        """Create NVML, the engine's environment and the machine's settings."""
        self.folder.mkdir(parents=True)
        if self.two:
            text = self.profile.read_text("utf-8").replace('"sm121-gpt', '"sm121x2-gpt')
            self.profile = self.folder / "two.toml"
            self.profile.write_text(text, "utf-8")
            self.settings = {"node_log": str(self.folder / "node1.log"), **self.settings}
        if self.drafter:
            self.environment = {"HF_HOME": str(self.folder), **self.environment}
            cached = self.folder / "hub" / f"models--{self.drafter.replace('/', '--')}"
            for file, text in (
                ("refs/main", "a1b2"),
                ("snapshots/a1b2/config.json", "{}"),
                ("snapshots/a1b2/model.safetensors", ""),
            ):
                (cached / file).parent.mkdir(parents=True, exist_ok=True)
                (cached / file).write_text(text, "utf-8")
        library = self.folder / "lib" / "libnvidia-ml.so.1"
        library.parent.mkdir(exist_ok=True)
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(HERE / "nvml.c")],
            check=True,
        )
        of_engine, of_suite = map(self._venv, ("engine", "suite"))
        _vllm(of_engine, self.version or self.release, self.release == BUILD)
        for name in LIBRARIES:
            code = fat_binaries.entry(fat_binaries.SASS, self.code)
            fat_binaries.library(of_engine / "vllm" / name, code)
        version = self.flashinfer or _flashinfer_of(self.release)
        _flashinfer(of_engine, version)
        for module in self.warm:
            folder = self.folder / f".cache/flashinfer/{version}/121a/cached_ops/{module}"
            folder.mkdir(parents=True)
            (folder / f"{module}.so").touch()
        for reader in ("dmesg", "journalctl"):
            program = self.folder / "bin" / reader
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!{sys.executable}\n{_DMESG}")
            program.chmod(0o755)
        # A certified run does not pass on the variables of the simulated machine, so every Python
        # of the machine sets them itself.
        names = ("GB10_KERNEL_LOG", "GB10_STATE", "GB10_DEVICE", "GB10_SETTINGS")
        variables = {name: self.surroundings()[name] for name in names}
        (of_suite / "sitecustomize.py").write_text(
            f"import os\nos.environ.update({variables!r})\n"
            + (HERE / "on_path" / "sitecustomize.py").read_text()
        )
        self.write()

    def _venv(self, name: str) -> Path:
        """Create an environment on top of this interpreter's environment, and return its folder of
        packages."""
        folder = self.folder / name
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        packages = next((folder / "lib").glob("python*")) / "site-packages"
        rest = [path for path in sys.path if path.endswith("site-packages")]
        added = "; ".join(f"site.addsitedir({path!r})" for path in rest)
        (packages / "rest.pth").write_text(f"import site; {added}\n{ROOT}\n")
        return packages

    def write(self) -> None:
        """Write the settings that may change between two runs."""
        (self.folder / "state").write_text("".join(f"{k} {v}\n" for k, v in self.state.items()))
        (self.folder / "kernel.log").write_text(self.kernel_log)
        (self.folder / "device.json").write_text(json.dumps(self.device))
        settings = {
            "release": self.release,
            "version": self.version or self.release,
            "behind": self.behind.url, "key": self.behind.key,
            "state": str(self.folder / "state"), "rates": self.rates, **self.settings,
        }  # fmt: skip
        (self.folder / "settings.json").write_text(json.dumps(settings))

    def command(self, *arguments: str) -> list[str]:
        """Return the command line that the machine's owner types."""
        of_suite = str(self.folder / "suite" / "bin" / "python")
        python = of_suite if "--certify" in arguments else sys.executable
        return [
            python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "sm121",
            f"--profile={self.profile}", f"--report-dir={self.report}",
            *([] if "--base-url" in arguments else [f"--engine-python={self.python}"]), *arguments,
        ]  # fmt: skip

    def surroundings(self) -> dict[str, str]:
        """Return the environment variables of a run."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        return {
            **inherited, "LD_LIBRARY_PATH": str(self.folder / "lib"),
            "PYTHONPATH": str(HERE / "on_path"),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "FLASHINFER_WORKSPACE_BASE": str(self.folder),
            "GB10_KERNEL_LOG": str(self.folder / "kernel.log"),
            "GB10_STATE": str(self.folder / "state"),
            "GB10_DEVICE": str(self.folder / "device.json"),
            "GB10_SETTINGS": str(self.folder / "settings.json"),
            **self.environment,
        }  # fmt: skip

    @contextlib.contextmanager
    def served(self, *arguments: str, tail: str = "") -> Iterator[tuple[str, ...]]:
        """Start a server to which the suite attaches, and yield the suite's arguments.

        `arguments` are further arguments of the server. `tail` is the content of its log file
        before the server writes to it."""
        self.write()
        log = self.folder / "owner.log"
        log.write_text(tail, "utf-8")
        port = free_port()
        command = [
            str(self.python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", f"openai/{MODEL}", "--served-model-name", MODEL, "--port", str(port),
            *arguments,
        ]  # fmt: skip
        with log.open("r+") as file:
            process = subprocess.Popen(command, env=self.surroundings(), stdout=file, stderr=file)
            try:
                url = f"http://127.0.0.1:{port}"
                _wait_for(url, process, log)
                logs = [f"--server-log={log}"]
                if self.two and not self.settings.get("ray"):
                    logs.append(f"--server-log={self.settings['node_log']}")
                yield "--base-url", url, *logs, "--arch", "sm121"
            finally:
                process.terminate()
                process.wait(20)

    def run(self, *arguments: str, timeout_s: float = 1800.0) -> subprocess.CompletedProcess[str]:
        """Run the suite on the simulated machine to its end."""
        self.write()
        variables = self.surroundings()
        if "--certify" in arguments:  # the suite's environment contains the simulated machine
            del variables["PYTHONPATH"]
        return subprocess.run(
            self.command(*arguments), cwd=ROOT, env=variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
        )  # fmt: skip

    @property
    def verdict(self) -> dict[str, Any]:
        return json.loads((self.report / "verdict.json").read_text("utf-8"))


#: A replacement for dmesg, whose messages have a time shortly before the call.
_DMESG = """import os, time
for line in open(os.environ["GB10_KERNEL_LOG"]):
    print(f"[{time.monotonic():12.6f}] {line}", end="")
"""


#: The options that the build accepts. Their values are not checked.
_PARSER = f"""def make_arg_parser(parser):
    for name in open({str(HERE / "mxfp4-options.txt")!r}).read().split():
        if name not in ("-h", "--help"):
            parser.add_argument(name, nargs="*")
    return parser
"""


#: Variables that FlashInfer's sources name and that the suite or a profile sets.
_FLASHINFER_VARIABLES = (
    "FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_WORKSPACE_BASE", "FLASHINFER_NVCC_THREADS",
)  # fmt: skip


def _flashinfer_of(release: str) -> str:
    """Return the version of FlashInfer that a release requires, or with which the build was
    made."""
    if release == BUILD:
        return "0.6.3"
    recorded = data.at(data.load(), release)
    assert recorded is not None, f"{data.FILE.name} has no {release}"
    return recorded.flashinfer


def _flashinfer(site: Path, version: str) -> None:
    """Install a FlashInfer that can be found and has a version, but contains no GPU code."""
    package = site / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "environment.py").write_text(f"NAMES = {_FLASHINFER_VARIABLES!r}\n")
    (package / "_build_meta.py").write_text(f'__version__ = "{version}"\n')
    dist_info(site, "flashinfer-python", version, package="flashinfer")


def _vllm(site: Path, release: str, build: bool) -> None:
    """Install a vLLM of this release whose version and packages can be read without a start.

    Its variables and its command line are those of this machine's real vLLM. The MXFP4 build has
    its own parser."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations, "vllm is not installed here"
    real = Path(spec.submodule_search_locations[0])
    package = site / "vllm"
    for inner in ("", "entrypoints", "entrypoints/openai"):
        folder = package / inner
        folder.mkdir(parents=True, exist_ok=True)
        original = real / inner / "__init__.py"
        text = original.read_text("utf-8") if original.is_file() else ""
        extend = f"__path__ = [*__path__, {str(real / inner)!r}]\n"
        if build and inner:
            text = extend = ""
        future = "from __future__ import annotations\n" if "from __future__" in text else ""
        text = text.replace("from __future__ import annotations\n", "")
        text = text.replace("import vllm.env_override", "")  # it imports torch, which takes seconds
        (folder / "__init__.py").write_text(future + extend + text)
    shutil.copy(real / "envs.py", package)
    (package / "config").mkdir()
    shutil.copy(real / "config" / "profiler.py", package / "config")
    (package / "config" / "__init__.py").write_text(
        f"__path__ = [*__path__, {str(real / 'config')!r}]\n"
        + (real / "config" / "__init__.py").read_text("utf-8")
    )
    version = f"__version__ = version = {release!r}\n__commit_id__ = None\n"
    (package / "_version.py").write_text(version)
    server = package / "entrypoints" / "openai" / "api_server.py"
    server.write_text("from meta_tests.fakes.gb10.server import main\n\nmain()\n")
    if build:
        (package / "entrypoints" / "openai" / "cli_args.py").write_text(_PARSER)
    dist_info(site, "vllm", release)
