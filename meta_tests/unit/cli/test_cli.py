"""The command ``sm121``: a wrong request gives one line and status 4, wherever the mistake is
found."""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import sm121.fixtures

from meta_tests.fakes.servers import executable
from meta_tests.folders import DATA
from meta_tests.releases import needs, needs_torch
from sm121 import cli
from sm121.cli import OF_A_CHECKOUT
from sm121.compilation import libraries


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            (),
            "sm121: the following arguments are required: COMMAND",
            id="sm121: the following arguments are required: COMMAND",
        ),
        pytest.param(
            ("nothing",),
            "sm121: argument COMMAND: invalid choice: 'nothing'",
            id="nothing, sm121: argument COMMAND: invalid choice",
        ),
        pytest.param(
            ("histroy",),
            "sm121: argument COMMAND: invalid choice: 'histroy'; did you mean history?",
            id="histroy, sm121: argument COMMAND: invalid choice",
        ),
        pytest.param(
            ("comapre", "a"), "did you mean compare?", id="comapre a, did you mean compare?"
        ),
        pytest.param(
            ("history", "a", "--htlm", "b"),
            "--htlm b; did you mean --html?",
            id="history a --htlm b, --htlm b; did you mean --html?",
        ),
        pytest.param(
            ("schema", "verdit"),
            "invalid choice: 'verdit'; did you mean verdict?",
            id="schema verdit, invalid choice: 'verdit'; did you mean",
        ),
        pytest.param(("schema", "zzz"), "(choose from", id="schema zzz, (choose from"),
        pytest.param(
            ("box", "--wrong"),
            "sm121: unrecognized arguments: --wrong",
            id="box --wrong, sm121: unrecognized arguments: --wrong",
        ),
        pytest.param(
            ("merge",),
            "sm121 merge: the following arguments are required: DIR",
            id="merge, sm121 merge: the following arguments are",
        ),
        pytest.param(
            ("canary-train", "f", "--steps", "0"),
            "argument --steps: expected at least 1, got 0",
            id="canary-train f --steps 0, argument --steps: expected at",
        ),
        pytest.param(
            ("matrix", "--strength", "x"),
            "sm121 matrix: --strength x: expected 1, 2 (pairs)",
            id="matrix --strength x, sm121 matrix: --strength x",
        ),
        pytest.param(
            ("matrix", "--strength", "99"),
            "sm121 matrix: --strength 99: expected at most",
            id="matrix --strength 99, sm121 matrix: --strength 99",
        ),
        pytest.param(
            ("matrix", "--profile", "cpu-tiny-gpt-oss", "--axes", "nothing"),
            "expected a file or one of cpu",
            id="matrix --profile cpu-tiny-gpt-oss --axes nothing",
        ),
        pytest.param(
            ("init-profile",),
            "sm121 init-profile: expected --base-url URL, or --model DIR|ID",
            id="init-profile, expected --base-url URL",
        ),
        pytest.param(
            ("profile", "init"),
            "sm121 init-profile: expected --base-url URL, or --model DIR|ID",
            id="profile init, expected --base-url URL",
        ),
        pytest.param(
            ("profile", "init", "--base-url", "127.0.0.1:1"),
            "sm121 init-profile: --base-url",
            id="profile init --base-url 127.0.0.1:1, sm121 init-profile",
        ),
        pytest.param(
            ("path",),
            "expected the LOG of a server, --container NAME or --libraries",
            id="path, expected the LOG of a server, --container NAME or",
        ),
        pytest.param(
            ("path", "some.log", "--libraries", "x"),
            "expected the LOG of a server, --container NAME or --libraries",
            id="path some.log --libraries x, expected the LOG of a",
        ),
        pytest.param(
            ("path", "--libraries", "/nonexistent/x.so"),
            "expected a file or a folder, got no such path. Give --libraries without a path",
            id="path --libraries /nonexistent/x.so, expected a file or",
        ),
        pytest.param(
            ("path", "--metrics", "README.md"),
            "--metrics README.md: expected the text of /metrics, got a text without a metric",
            id="path --metrics README.md, a text that is no /metrics",
        ),
        pytest.param(
            ("path", "--libraries", "/bin/sh", "--gpu", "gb10"),
            "expected the form",
            id="path --libraries /bin/sh --gpu gb10, expected the form",
        ),
        pytest.param(
            ("path", "--trace", "/nowhere.json"),
            "expected a trace",
            id="path --trace /nowhere.json, expected a trace",
        ),
        pytest.param(
            ("report", "/usr"),
            "expected a report directory",
            id="report /usr, expected a report directory",
        ),
        pytest.param(("bundle", "/usr"), "verdict.json", id="bundle /usr, verdict.json"),
        pytest.param(
            ("merge", "/usr"),
            "expected a report directory with verdict.json",
            id="merge /usr, expected a report directory with",
        ),
        pytest.param(
            ("path", "README.md", "--engine", "tgi"),
            "llama-cpp, sglang, vllm",
            id="path README.md --engine tgi, llama-cpp, sglang, vllm",
        ),
        pytest.param(
            ("path", "--jit-cache", "/nowhere"),
            "got no such path. By default, FlashInfer uses",
            id="path --jit-cache /nowhere, got no such path",
        ),
        pytest.param(
            ("compare", "/nowhere"),
            "expected a report directory",
            id="compare /nowhere, expected a report directory",
        ),
        pytest.param(
            ("plan", "--profile", "no-such"),
            "sm121 plan: --profile no-such: expected a file",
            id="plan --profile no-such, sm121 plan: --profile no-such",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("plan", "--nonsense"),
            "sm121 plan: unrecognized arguments: --nonsense",
            id="plan --nonsense, sm121 plan: unrecognized arguments",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("plan", "-k", "nonsense"),
            "sm121 plan: -k 'nonsense': expected the name of a check",
            id="plan -k nonsense",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("plan", "-k"),
            "sm121 plan: argument -k: expected one argument (see pytest --help)",
            id="plan -k",
        ),
        pytest.param(
            ("plan", "-c", "/nowhere"),
            "sm121 plan: Config file '/nowhere' not found",
            id="plan -c /nowhere",
            marks=needs("pytest", "9", "it ignores a configuration file that does not exist"),
        ),
        pytest.param(
            ("plan", "-W", "bad::x"),
            "warning configuration: bad::x This error occurred: invalid action: 'bad'",
            id="plan -W bad::x",
        ),
        pytest.param(
            ("plan", "-n"),
            "sm121 plan: -n: expected one argument. -n numprocesses: ",
            id="plan -n",
            marks=needs("pytest", "9", "its text for an option without a value is another one"),
        ),
        pytest.param(
            ("plan", "tests/none.py"),
            "sm121 plan: file or directory not found: tests/none.py",
            id="plan tests/none.py",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("plan", "tests/test_smoke.py::test_none"),
            "test_smoke.py::test_none: expected the name of a test in its file",
            id="plan tests/test_smoke.py::test_none",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("plan", "--certify", "-k", "health"),
            "sm121 plan: --certify with -k health",
            id="plan --certify -k health",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("plan", "--ab", "X"), "argument --ab: expected 2 arguments", id="plan --ab X"
        ),
        pytest.param(("plan", "--format", "xml"), "invalid choice: 'xml'", id="plan --format xml"),
        pytest.param(
            ("vocabulary", "/proc/nope"),
            "sm121 vocabulary: /proc/nope: expected a path that can be read or written, got: no "
            "such file or directory. Check the path and its permissions.",
            id="vocabulary /proc/nope",
        ),
        pytest.param(
            ("report", "/proc/nope"),
            "/proc/nope: expected a report directory with verdict.json, got: no such file or "
            "directory. Name the folder of a run's --report-dir.",
            id="report /proc/nope",
        ),
        pytest.param(
            ("path", "/proc/self/mem"),
            "/proc/self/mem: expected the log file of a server, got one that cannot be read: "
            "input/output error. Save one: ",
            id="path /proc/self/mem",
        ),
        pytest.param(
            ("tolerances", "--output", "/proc/nope/page.md"),
            "sm121 tolerances: --output /proc/nope/page.md: expected a file that can be written, "
            "got: no such file or directory. ",
            id="tolerances --output /proc/nope/page.md",
            marks=needs_torch,
        ),
    ],
)
def test_a_wrong_request_is_one_line(arguments, line, capsys):
    assert cli.main(arguments) == 4
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and line in printed.err
    assert "Errno" not in printed.err


def options_with_a_value() -> list[object]:
    """Return each option and positional argument of the command line that takes a value."""
    rows = []
    for name, command in cli.parser().commands.items():
        for action in command._actions:
            if action.nargs == 0 or action.choices is not None:
                continue
            words = [name, action.option_strings[-1], ""] if action.option_strings else [name, ""]
            rows.append(pytest.param(words, action, id=" ".join(words)))
    return rows


@pytest.mark.parametrize(("words", "action"), options_with_a_value())
def test_an_empty_value_is_refused(words, action, capsys, tmp_path, monkeypatch):
    """The command refuses an empty value of an option or argument.

    An empty value usually comes from an unset variable; as a path it is the current folder."""
    monkeypatch.chdir(tmp_path)
    if action.default == "":
        cli.parser().parse_args(words)
        return
    assert cli.main(words) == 4
    (printed,) = capsys.readouterr().err.splitlines()
    assert "expected a value, got an empty one. Leave it out, or set the variable" in printed, words


def test_help_is_no_wrong_request(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["merge", "--help"])
    assert ended.value.code == 0 and "DIR" in capsys.readouterr().out


def test_help_has_the_commands_in_groups(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    judge, look, gate, more, authors = capsys.readouterr().out.split("\n\n")[2:7]
    assert "  run " in judge and "  history " in look and "  trust " in gate and "  warm " in more
    for name in OF_A_CHECKOUT:
        assert f"  {name} " in authors


def test_help_of_a_run_is_the_suites_own(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--help"])
    text = capsys.readouterr().out
    assert not ended.value.code and "--base-url" in text and "--collect-only" not in text


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--base-url", "http://x", "--help"]])
def test_help_of_certify_is_no_option_of_a_certificate(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["certify", *words])
    assert ended.value.code == 0
    assert "run all tests that a certificate needs" in capsys.readouterr().out


def test_an_installed_copy_says_that_a_tool_needs_a_checkout(tmp_path):
    installed = tmp_path / "lib" / "site-packages" / "sm121"
    shutil.copytree(Path(sm121.__file__).parent, installed)
    data = Path(sm121.fixtures.__file__).parent
    shutil.copytree(data, installed / "fixtures", dirs_exist_ok=True)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(installed.parent)}
        command = [sys.executable, "-m", "sm121", *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=tmp_path
        )

    done = run("canary-train", "weights.safetensors", "--steps", "1")
    assert done.returncode == 4
    assert done.stderr == "sm121 canary-train: needs a checkout of the suite, see tools/ there\n"
    helped = run("--help").stdout
    assert "  history " in helped and "ablation" not in helped


def test_a_log_on_standard_input_is_named_so(monkeypatch, capsys):
    """If a log is read from standard input, messages say so, because the name of the temporary copy
    would not help a user."""
    piped = SimpleNamespace(buffer=io.BytesIO(b"no such container\n"), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", piped)
    assert cli.main(["path", "-"]) == 4
    assert "standard input: expected the log of a server" in capsys.readouterr().err


def test_a_log_in_a_pipe_is_read(capsys):
    """A log is read from a pipe like the one that bash creates for ``sm121 path <(docker logs
    NAME)``."""
    read, write = os.pipe()
    log = DATA / "gb10" / "unfused_0804_clean.log"
    writer = threading.Thread(target=_write, args=(write, log.read_bytes()))
    writer.start()
    assert cli.main(["path", f"/dev/fd/{read}"]) == 0
    writer.join()
    os.close(read)
    shown = capsys.readouterr().out
    assert shown.startswith("vllm 0.14.0+mxfp4") and "/dev/fd" not in shown


def _write(descriptor: int, content: bytes) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def test_a_jit_cache_without_modules_is_one_line(tmp_path, capsys):
    """A JIT cache without modules is reported in one line.

    Before, the command printed a kernel path of which every value was null."""
    assert cli.main(["path", "--jit-cache", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no compiled modules\n"
    assert cli.main(["path", "--json", "--jit-cache", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["jit_cache"] == []


def test_path_without_docker_names_the_other_sources(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["path", "--container", "served"]) == 4
    assert "Name the log itself: sm121 path LOG" in capsys.readouterr().err


def test_libraries_of_no_engine_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(libraries, "engine_places", lambda python: [])
    assert cli.main(["path", "--libraries"]) == 4
    assert "--libraries: expected one of vllm, flashinfer" in capsys.readouterr().err


def test_output_whose_reader_has_ended_is_no_error(monkeypatch, capsys):
    """If the reader of the output has ended (``sm121 testlog RUN | head``), this is no error.

    Before, the command printed "expected files that can be read and written"."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert cli.main(["schema", "verdict"]) == 1
    assert not capsys.readouterr().err


def test_an_interrupted_command_is_one_line(monkeypatch, capsys):
    def waits(_options: object) -> int:
        raise KeyboardInterrupt

    options = SimpleNamespace(command="health", run=waits)
    monkeypatch.setattr(cli, "parser", lambda: SimpleNamespace(parse_args=lambda _words: options))
    assert cli.main(["health"]) == 2
    assert capsys.readouterr().err == "sm121 health: interrupted\n"


def test_a_plan_is_refused_without_the_models_file(tmp_path, monkeypatch, capsys):
    """Only the run was refused, so `sm121 side-by-side` found it after the first engine's run."""
    monkeypatch.setenv("SM121_CANARY", str(tmp_path))
    program = executable(tmp_path / "llama-server", "echo version: 6000; exit 0")
    words = ["--arch", "cpu", "--engine", "llama-cpp", f"--engine-binary={program}"]
    assert cli.main(["plan", *words, "tests/test_smoke.py"]) == 4
    expected = f"expected it at {tmp_path / 'canary.gguf'}, got no file"
    assert expected in capsys.readouterr().err
