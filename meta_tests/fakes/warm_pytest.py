"""A process that has imported pytest and the suite, and forks a run of pytest for each request.

Starting an interpreter and importing the suite takes a run 2 to 4 s of CPU, and most runs of the
tests judge a server in less. A fork is still a separate process: no run sees the state of another.
A test that needs a new interpreter starts one. The workers of pytest-xdist share one template,
which their controller starts.
"""

import atexit
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

#: Variables that an interpreter reads at its start; a fork would not read them.
READ_AT_THE_START = ("PYTHON", "LC_", "LANG", "TZ", "OMP_", "OPENBLAS_")
#: Variables that do not change the answers of an interpreter to the suite's queries.
NOT_ASKED = ("SM121_", "PYTEST_", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")


class WarmRun:
    """A forked run, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, template: "WarmPytest", pid: int) -> None:
        self._template = template
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        return self._template.ended.get(self.pid)

    def poll(self) -> int | None:
        self._template.read(0)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end of the run.

        Raises subprocess.TimeoutExpired if the run has not ended after ``timeout_s`` seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.returncode is None:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise subprocess.TimeoutExpired(f"pytest, pid {self.pid}", timeout_s or 0)
            self._template.read(remaining)
        return self.returncode


class Template:
    """The process that forks runs. It lives until `close`, or until this process ends."""

    def __init__(self, root: Path, environment: Mapping[str, str] = os.environ) -> None:
        """Start the process.

        Args:
            root: Its working directory.
            environment: Its variables; those of pytest are left out.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        #: The path of the socket at which this process listens.
        self.address = str(Path(self._folder.name) / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            descriptor = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), self._folder.name, str(descriptor)],
                cwd=root, env=_without_pytest(environment), pass_fds=[descriptor],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


class WarmPytest:
    """A connection to the template process; several processes may each have one."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        #: The exit status of each process; the keys are process ids. After a signal, it is minus
        #: the number of the signal, as in `Popen`.
        self.ended: dict[int, int] = {}
        self._begun: list[int] = []
        #: The beginning of a line that has not arrived completely.
        self._received = b""

    def start(
        self,
        arguments: list[str],
        output: Path,
        environment: dict[str, str],
        *,
        folder: Path | None = None,
    ) -> WarmRun:
        """Fork a run in its own session, which writes to ``output``.

        ``folder`` is its working directory, by default that of the template."""
        request = {
            "arguments": arguments,
            "output": str(output),
            "environment": environment,
            "folder": None if folder is None else str(folder),
        }
        self._socket.settimeout(None)
        _say(self._socket, request)
        while not self._begun:
            self.read(None)
        return WarmRun(self, self._begun.pop())

    def read(self, timeout_s: float | None) -> None:
        """Read lines from the template, if any arrive within ``timeout_s`` seconds."""
        self._socket.settimeout(timeout_s)
        try:
            received = self._socket.recv(65536)
        except (BlockingIOError, TimeoutError):
            return
        assert received, "the template of the runs has ended"
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if "status" in event:
                self.ended[event["pid"]] = event["status"]
            else:
                self._begun.append(event["pid"])

    def close(self) -> None:
        self._socket.close()


def can_fork(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a fork uses these variables in the same way as a new interpreter would.

    xdist stores the import path when it is imported, and passes this path to its workers. A run
    with workers therefore cannot set PYTHONPATH."""
    workers = any(argument.startswith(("-n", "--tx")) for argument in arguments)
    return not any(
        name.startswith(READ_AT_THE_START) and (workers or name != "PYTHONPATH")
        for name in environment
    )


def _without_pytest(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}


@dataclass(frozen=True)
class _Forked:
    """A child of the template, and the connection over which it was requested."""

    pid: int
    connection: socket.socket


def _serve(listener: socket.socket) -> dict[str, Any]:
    """Fork a child for each request. This function returns only in the child, with the request."""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    os._exit(0)
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif isinstance(key.data, _Forked):
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(key.data.pid, 0)[1])
                    with suppress(OSError):  # nobody waits for this run any more
                        _say(key.data.connection, {"pid": key.data.pid, "status": status})
                elif request := _request(key.fileobj):
                    pid = os.fork()
                    if not pid:
                        _close_all(selector)
                        return request
                    forked = _Forked(pid, key.fileobj)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, forked)
                    _say(key.fileobj, {"pid": pid})
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()


def _request(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next request, or None at the end of the connection."""
    with connection.makefile("rb") as lines:
        line = lines.readline()
    return json.loads(line) if line else None


def _close_all(selector: selectors.BaseSelector) -> None:
    """Close the template's connections, and its descriptors of other runs, in a child."""
    for key in selector.get_map().values():
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        elif key.fd:
            os.close(key.fd)


def _say(connection: socket.socket, content: dict[str, Any]) -> None:
    connection.sendall(json.dumps(content).encode() + b"\n")


def _become(request: dict[str, Any]) -> None:
    """Run like ``python -m pytest``, with the arguments of a request."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in (nothing, output):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    if request["folder"] is not None:
        os.chdir(request["folder"])
    paths = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = list(dict.fromkeys([str(Path.cwd()), *filter(None, paths), *sys.path[1:]]))
    importlib.invalidate_caches()


def _kept(folder: Path, question: object, answer: Callable[[], Any]) -> Any:
    """Return the stored result of a query; the first run that needs it computes and stores it."""
    asked = json.dumps(question, sort_keys=True)
    file = folder / hashlib.sha256(asked.encode()).hexdigest()
    if not file.is_file():
        text = json.dumps(answer())
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as whole:
            whole.write(text)
        Path(whole.name).replace(file)
    return json.loads(file.read_text("utf-8"))


def _remember_answers(folder: Path) -> None:
    """Let runs share the results of queries about this interpreter's packages and engine options.

    Each run makes three queries, which take as long as the rest of a short run. A result is stored
    under the query, the script and the whole environment without the suite's own variables. Other
    interpreters, other search paths and failed queries are queried again. `fake_python.py` answers
    as this interpreter does, and no result depends on the folder of temporary files.
    """
    interpreter = importlib.import_module("sm121.core.interpreter")
    ask = interpreter.ask
    search_path = os.environ.get("PYTHONPATH")
    fake_python = str(Path(__file__).with_name("fake_python.py"))

    def remembered(
        python: str,
        script: str | Path,
        environment: Mapping[str, str],
        question: object = None,
        **options: float,
    ) -> Any:
        stands_for_it = (
            python == fake_python and environment.get("SM121_META_PYTHON") == sys.executable
        )
        is_known = python == sys.executable or stands_for_it
        if not is_known or environment.get("PYTHONPATH") != search_path:
            return ask(python, script, environment, question, **options)
        variables = {k: v for k, v in environment.items() if not k.startswith(NOT_ASKED)}
        asked = [str(script), question, str(Path.cwd()), variables]
        return _kept(folder, asked, lambda: ask(python, script, environment, question, **options))

    interpreter.ask = remembered


def _remember_the_commit() -> None:
    """Store the commit of this checkout for all runs. pytest-benchmark would start seven processes
    in each run to find it."""
    utils = importlib.import_module("pytest_benchmark.utils")
    of_project = functools.cache(utils.get_commit_info)

    def remembered(project_name: str | None = None) -> dict[str, Any]:
        return dict(of_project(project_name))

    utils.get_commit_info = remembered
    importlib.import_module("pytest_benchmark.plugin").get_commit_info = remembered
    remembered()


def _remember_the_processor(folder: Path) -> None:
    """Store pytest-benchmark's description of the processor for all runs.

    It takes 1 s of CPU time at the end of each run that saves or compares."""
    plugin = importlib.import_module("pytest_benchmark.plugin")
    described = _kept(folder, "processor", plugin.get_cpu_info)

    def remembered() -> dict[str, Any]:
        return dict(described)

    plugin.get_cpu_info = remembered


def _remember_packages() -> None:
    """Store the contents of the installed packages for all runs.

    pytest reads the entry points of all packages three times at the start of each run. Nothing is
    installed here while tests run."""
    distribution = importlib.metadata.PathDistribution
    installed = (sys.prefix, str(Path.cwd()))
    known: dict[tuple[str, str], Any] = {}

    def remembered(name: str) -> property:
        original = getattr(distribution, name).fget

        def value(package: importlib.metadata.PathDistribution) -> Any:
            path = str(package._path)
            if not path.startswith(installed):
                return original(package)
            if (path, name) not in known:
                known[path, name] = original(package)
            return known[path, name]

        return property(value)

    for name in ("entry_points", "files", "metadata"):
        setattr(distribution, name, remembered(name))
    for package in importlib.metadata.distributions():
        _ = package.metadata
        if any(entry.group == "pytest11" for entry in package.entry_points):
            _ = package.files


def _remember_arrays(folder: Path) -> None:
    """Store the covering arrays of the matrix for all runs.

    Each run that collects the matrix computes 24 of them."""
    covertable = importlib.import_module("covertable")
    make = covertable.make

    def remembered(factors: dict[str, list[Any]], **options: Any) -> Any:
        return _kept(folder, [factors, options], lambda: make(factors, **options))

    covertable.make = remembered


def _load_data() -> None:
    """Load the data files that most runs read.

    A second call of the same functions then reads no file."""
    for module, function, *arguments in (
        ("sm121.answers.prompts", "continuations"),
        ("sm121.answers.prompts", "questions"),
        ("sm121.api.cases", "shipped"),
        ("sm121.api.chats", "load_chats"),
        ("sm121.compilation.jit", "load_jit"),
        ("sm121.compilation.modules", "load_modules"),
        ("sm121.compilation.probes", "load_probes"),
        ("sm121.core.builds", "shipped"),
        ("sm121.engines.preflight", "load_preflight"),
        ("sm121.engines.request_rules", "load_requests", "vllm"),
        ("sm121.engines.sign_reader", "_load_pages"),
        ("sm121.evidence.failure_tables", "load_failures"),
        ("sm121.kernels.serving", "_data"),
        ("sm121.machine.this_machine", "faults", "sm121", ""),
        ("sm121.plugin.given", "fingerprinted", ()),
        ("sm121.report.references", "load"),
        ("sm121.session.certification", "inventory"),
        ("sm121.session.durations", "load"),
        ("sm121.session.fingerprinting", "location_variables"),
    ):
        getattr(importlib.import_module(module), function)(*arguments)
    # Read these properties now, because they compile a pattern of all known messages.
    messages = importlib.import_module("sm121.evidence.kernel_messages").KernelMessages()
    _ = messages.xids, messages.host_faults
    data_file = importlib.import_module("sm121.core.data_file")
    data_file.load_key("computing-packages.toml", "packages", tuple[str, ...])
    axes = importlib.import_module("sm121.matrix.axes")
    axes.load = functools.cache(axes.load)
    for module, folder, ending in (
        ("sm121.core.profile", "profiles", ".toml"),
        ("sm121.answers.exam", "exams", ".jsonl"),
        ("sm121.matrix.axes", "matrix", ".toml"),
    ):
        for name in data_file.shipped(folder, ending):
            importlib.import_module(module).load(name)


class _Imports:
    """A plugin that imports hypothesis while pytest's hook for assertions is installed: without the
    hook, pytest warns about the plugin's package."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self) -> None:
        importlib.import_module("hypothesis.strategies")


def _compile_templates() -> None:
    """Compile the templates that every run fills, because compiling takes longer than filling
    them."""
    page = importlib.import_module("sm121.report.page").environment()
    plain = importlib.import_module("sm121.report.summary").plain
    junit = importlib.import_module("sm121.report.junit")
    templates = importlib.import_module("sm121.core.templates")
    names = {
        page: ("report.html", "requests.html", "tests.html", "figure.html", "asked"),
        templates.environment(plain): ("summary.md", "asked"),
        templates.environment(templates.one_line): ("header.txt", "target.txt", "closing.txt"),
        templates.environment(None): ("why", "price", "plan_head.txt", "reservations", "sentence"),
        templates.environment(junit._escaped, escapes=True): ("junit.xml",),
    }
    for environment, each in names.items():
        for name in each:
            environment.get_template(f"{name}.j2")


if __name__ == "__main__":
    # As with `python -m pytest`, runs do not import from the folder of this script.
    sys.path[0] = str(Path.cwd())
    # This call imports every plugin and starts no run.
    pytest.main(["--version", "--version"], plugins=[_Imports()])
    sys.stdout.flush()
    _compile_templates()
    shared = Path(sys.argv[1])
    _remember_packages()
    _remember_answers(shared)
    _remember_arrays(shared)
    _remember_the_commit()
    _remember_the_processor(shared)
    # Also import what a run imports and reads after its start.
    for module in (
        *("httpcore", "pynvml", "encodings.idna", "pytest_benchmark.storage.file"),
        *("pytest_bench_gate.gates", "pdb", "scipy.special", "sm121.stress.level"),
        *("sm121.api.chat_prompts", "sm121.api.compatibility", "sm121.api.endings"),
        *("sm121.api.guarded_client", "openai.resources.chat"),
        *("sm121.api.logprobs", "sm121.api.responses", "sm121.api.sampling"),
        *("sm121.api.streaming", "sm121.api.structured_output"),
        *("sm121.compilation.modules", "sm121.evidence.kernel_requirement"),
    ):
        importlib.import_module(module)
    importlib.import_module("sm121.core.bounded").tls()
    _load_data()
    # The first call resolves the files of all modules. pytest calls it for each skipped test.
    inspect.getmodule(_serve.__code__)
    # pytest collects garbage several times at its end. After `freeze`, a fork does not examine the
    # objects of this process.
    gc.collect()
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[2])))
    _become(request)
    sys.argv = [str(Path(pytest.__file__).with_name("__main__.py")), *request["arguments"]]
    status = pytest.main(request["arguments"])
    # End like an interpreter, but without freeing every object, because that would copy the memory
    # of the forking process.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
