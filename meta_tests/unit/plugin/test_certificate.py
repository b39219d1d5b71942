"""The arguments and variables that a run with --certify accepts, and the options in a
fingerprint."""

import argparse
import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.config import get_config

from meta_tests.fakes.whole_run import CPU
from sm121.core import data_file, errors, own_tests
from sm121.plugin import certificate, terminal
from sm121.plugin.given import Given, fingerprinted, given
from sm121.report import run_plan
from sm121.session import certified_run, own_options
from sm121.session.given_attached import GivenServer
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings

#: All options that --certify accepts, with pytest's name for each.
ALLOWED = {
    *("arch", "profile", "engine", "engine_python", "engine_binary", "base_url", "api_key"),
    *("api_key_file", "server_log", "container", "launcher", "node_command", "master_addr"),
    *("model", "served_model_name", "image_id", "certify", "golden", "soak", "against", "waivers"),
    *("report_dir", "format", "basetemp", "xmlpath", "benchmark_autosave", "benchmark_compare"),
    *("benchmark_compare_fail", "benchmark_storage", "capture", "collectonly", "color"),
    *("durations", "quiet", "reportchars", "tbstyle", "verbose"),
}


@pytest.fixture
def parsed():
    """Parse a command line as pytest does, without configuring anything."""
    configs = []

    def parse(*words: str) -> pytest.Config:
        configs.append(get_config([*words]))
        manager = configs[-1].pluginmanager
        return manager.hook.pytest_cmdline_parse(pluginmanager=manager, args=[*words])

    yield parse
    for config in configs[::-1]:
        config._ensure_unconfigure()


@pytest.fixture
def certified(parsed, monkeypatch):
    """Parse arguments as the process of a certified run does."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)
    return lambda *words: parsed(*certified_run.command(words)[4:])


def with_value(config: pytest.Config, dest: str, value: object) -> list[Given]:
    """Return the options that would be given if an option had this value."""
    option = argparse.Namespace(**{**vars(config.option), dest: value})
    other = copy.copy(config)
    other.option = option
    return given(other)


def test_every_registered_option_is_refused_but_for_the_allowed(certified):
    config = certified("-q")
    certificate.refuse_options(given(config))
    accepted = set()
    for dest in vars(config.option):
        value = ["another value"] if isinstance(getattr(config.option, dest), list) else "another"
        options = with_value(config, dest, value)
        assert dest in [option.dest for option in options]
        try:
            certificate.refuse_options(options)
            accepted.add(dest)
        except errors.UsageError as error:
            assert "--certify with " in str(error)
    assert accepted == ALLOWED


@pytest.mark.parametrize(
    ("words", "named"),
    [
        pytest.param(words, named or words[0].partition("=")[0], id=" ".join(words))
        for words, named in (
            (("--depths", "0"), ""),
            (("--depths", ""), ""),
            (("--rounds", "1"), ""),
            (("--plan", "quick"), ""),
            (("--plan", "full"), ""),
            (("--matrix", "none"), ""),
            (("--matrix-axes", "cpu"), ""),
            (("--configuration", "bfloat16"), ""),
            (("--kernel-provider", "torch"), ""),
            (("--kernel-provider", "pytest_timeout"), ""),
            (("--exam", "mine.jsonl"), ""),
            (("--rounding", "checkpoint"), ""),
            (("--benchmark-disable",), ""),
            (("--benchmark-skip",), ""),
            (("--shard", "1/2"), ""),
            (("-o", "python_functions=test_health"), "python_functions"),
            (("--override-ini=python_files=test_smoke.py",), "python_files"),
            (("-o", "testpaths=meta_tests/whole/scenarios"), "testpaths"),
            (("-k", "health"), ""),
            (("-vk", "health"), "-k"),
            (("-m", "smoke"), ""),
            (("-m", "cpu and not stress"), ""),
            (("--deselect", "tests/test_stress.py"), ""),
            (("--ignore=tests/test_stress.py",), ""),
            (("--ignore-glob=*stress*",), ""),
            (("tests/test_smoke.py",), "paths or node ids"),
            (("tests/test_smoke.py::test_health",), "paths or node ids"),
            (("--setup-only",), ""),
            (("--runxfail",), ""),
            (("--continue-on-collection-errors",), ""),
            (("-x",), "--exitfirst"),
            (("--assert=plain",), ""),
            (("--import-mode=importlib",), ""),
            (("--rootdir=tests",), ""),
            (("-c", "/dev/null"), "--config-file"),
            (("-p", "no:timeout"), ""),
            (("-p", "no:benchmark"), ""),
            (("-p", "no:skipping"), ""),
            (("-p", "no:threadexception"), ""),
            (("-p", "no:sm121.plugin.performance"), ""),
            (("-p", "meta_tests.fakes.warm_pytest"), ""),
            (("--timeout=1",), ""),
            (("-W", "ignore"), "--pythonwarnings"),
            (("--engine-arg=--enforce-eager",), ""),
            (("--engine-args=--enforce-eager",), ""),
            (("--engine-env", "VLLM_X=1"), ""),
            (("--engine-debug",), ""),
            (("--kernel-trace", "off"), ""),
            (("--reference", ".cache/canary/bf16"), ""),
            (("--reference", "pytest_timeout"), ""),
            (("--ab", "", "X=1"), ""),
            (("--resume",), ""),
        )
    ],
)
def test_options_that_select_tests_refuse_the_certificate(certified, words, named):
    """Options that select tests refuse the certificate, because a favourable selection must not
    give one."""
    config = certified("--arch", "cpu", *words)
    with pytest.raises(errors.UsageError, match=f"--certify with .*{re.escape(named)}"):
        certificate.refuse_options(given(config))


@pytest.mark.parametrize("word", ["-n2", "--lf", "--ff", "--sw", "--share-machine"])
def test_a_certified_run_refuses_options_of_other_plugins(certified, word):
    """A certified run refuses options of other plugins, because their plugins are not loaded.

    It also refuses words that are no option."""
    with pytest.raises(
        pytest.UsageError, match=r"unrecognized argument|expected a run without workers"
    ):
        certified("--arch", "cpu", word)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=" ".join(words))
        for words in (
            ("-v", "--tb=short", "--durations=3", "-rA", "--color=no", "-s"),
            ("-m", "cpu", "--junitxml=build/junit.xml", "-qq", "--collect-only"),
            ("--benchmark-autosave", "--benchmark-storage=build/history", "--basetemp=build/tmp"),
            ("--benchmark-compare=0001", "--benchmark-compare-fail=median:5%"),
            ("--engine-python", sys.executable, "--engine", "vllm"),
            ("--base-url", "http://spark:8000", "--server-log", "serve.log", "--api-key", "k"),
            ("--profile", "mine.toml", "--soak", "30m", "--golden", "golden.json"),
            ("-p", "no:cacheprovider", "--noconftest"),  # `sm121 certify` passes these
        )
    ],
)
def test_a_certificate_accepts_options_of_address_and_output(certified, words):
    certificate.refuse_options(given(certified(*words)))


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(variables, id=",".join(variables))
        for variables in (
            {"PYTEST_ADDOPTS": "--depths 0"},
            {"PYTEST_ADDOPTS": "-k health"},
            {"PYTEST_PLUGINS": "foreign_plugin"},
            {"PYTEST_TIMEOUT": "1"},
            {"VLLM_X": "1"},
            {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN", "FLASHINFER_DISABLE": "1"},
            {"PYTHONOPTIMIZE": "1"},
            {"PYTHONWARNINGS": "error"},
            {"SM121_LOCKS": "/another/folder"},
            {run_plan.VARIABLE: "verdict.json"},
        )
    ],
)
def test_a_variable_of_the_caller_does_not_reach_the_run(variables):
    allowed = {"PATH": os.environ["PATH"], "HF_HOME": "/models", "SM121_API_KEY": "k"}
    reached = certified_run.environment({**allowed, **variables}, ["--arch", "cpu"])
    assert reached == {**allowed, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    assert certified_run.environment(reached, ["--arch", "cpu"]) == reached


def test_only_a_run_that_collects_writes_the_file_of_a_plan(tmp_path):
    """Only a run that collects tests writes the file of a plan.

    A certified or refused run does not write the file that the variable names."""
    file = tmp_path / "plan.json"
    variables = {run_plan.VARIABLE: str(file)}
    refused = ("--arch", "cpu", "-k", "health")
    stderr = ended(tmp_path, "-m", "sm121", "certify", *refused, **variables)
    assert len(stderr.splitlines()) == 1 and not file.exists(), stderr
    ended(tmp_path, "-m", "sm121", "certify", "--collect-only", *refused, **variables)
    assert "--certify with -k health" in (run_plan.read_answer(file).refusal or "")


def test_the_run_is_built(tmp_path):
    """A request for a certificate gets this command line and exit status."""
    plugin = tmp_path / "foreign_plugin.py"
    plugin.write_text(f"open({str(tmp_path / 'loaded')!r}, 'w')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p sm121.plugin --depths 0\n")
    (tmp_path / "conftest.py").write_text(f"open({str(tmp_path / 'conftest')!r}, 'a').write('x')\n")
    typed = ["--certify", "--arch", "cpu", "-k", "health"]
    variables = {"PYTEST_ADDOPTS": "--rounds 1", "VLLM_X": "1", "PYTEST_PLUGINS": "foreign_plugin"}
    done = ended(tmp_path, "-O", "-m", "pytest", *typed, **variables)
    (line,) = done.splitlines()
    assert line.startswith(
        "ERROR: --certify with -k health: expected a run with the settings of the profile"
    )
    words = certified_run.command(typed)
    assert words[1:4] == ["-P", "-m", "pytest"] and words[-5:] == typed
    assert certified_run.command(own_tests.given(words)) == words
    assert {"-c", str(own_tests.settings()), "--noconftest"} <= {*words}
    assert not certified_run.is_this_process()
    assert "--certify with -k health" in ended(tmp_path, "-m", "sm121", "certify", *typed[1:])
    assert (tmp_path / "conftest").read_text() == "x", "the caller's conftest is not in the run"


def test_an_open_run_shows_which_variables_were_removed(monkeypatch):
    """When a run opens, it shows which variables were removed.

    A refused run does not, because its refusal is one line."""
    begun = {}
    monkeypatch.setattr(os, "execve", lambda _, words, variables: begun.update(variables))
    monkeypatch.setattr(os, "environ", {"PATH": "/bin", "VLLM_X": "1", "PYTHONWARNINGS": "error"})
    certified_run.start(["--arch", "cpu"])
    assert certified_run.environment(begun, ["--arch", "cpu"]) == begun
    shown = []
    monkeypatch.setattr(os, "environ", begun)
    monkeypatch.setattr(terminal, "say", lambda _, *words: shown.append(words))
    certificate.show_removed_variables(SimpleNamespace(getoption=lambda _: True))
    assert shown == [("certificate", "runs without these variables: PYTHONWARNINGS, VLLM_X")]


def ended(folder: Path, *words: str, **variables: str) -> str:
    """Return Python's message for these refused arguments."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True,
        env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == 4, done.stdout + done.stderr
    return done.stderr.strip()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("sm121", "certify"),
            id="sm121 certify",
            marks=pytest.mark.slow("pytest --certify starts it"),
        ),
        pytest.param(("pytest", "--certify"), id="pytest --certify"),
    ],
)
def test_other_code_than_the_callers_is_not_certified_in_its_place(words):
    """If the certified process would import other code than the caller's, it is refused.

    A container has its vLLM checkouts on PYTHONPATH; without this variable, another vLLM would run.
    """
    checkouts = "/workspace/flashinfer:/workspace/vllm"
    stderr = ended(Path(), "-m", *words, "--arch", "cpu", PYTHONPATH=checkouts)
    assert "--certify with the variable PYTHONPATH: expected no such variable" in stderr
    assert len(stderr.splitlines()) == 1


# Faults that appear when the tests are collected.


def wrong(markexpr: str = "", soak: str | None = "30m", **groups: object) -> str:
    """Return the faults of a certificate with a profile that requires half an hour of soak."""
    options = {"markexpr": markexpr, "--soak": soak}
    certify = CPU.certify.model_copy(update={"soak_s": 1800.0})
    target = SimpleNamespace(arch="cpu", profile=CPU.model_copy(update={"certify": certify}))
    config = SimpleNamespace(getoption=lambda name, *_: options[name])
    return "; ".join(certificate._wrong_values(config, Settings(**groups), target))


def test_a_certificate_of_the_profile_has_no_wrong_value():
    assert wrong() == wrong("cpu") == wrong(soak="2h") == ""


@pytest.mark.parametrize(
    ("given_values", "expected"),
    [
        pytest.param({"markexpr": "sm121"}, "-m 'sm121': expected none, or the target", id="m"),
        pytest.param(
            {"target": GivenTarget(model=".cache/canary/mxfp4")},
            "--model .cache/canary/mxfp4",
            id="model",
        ),
        pytest.param(
            {"attached": GivenServer("http://x"), "target": GivenTarget(served_name="other")},
            "--served-model-name other",
            id="name",
        ),
        pytest.param({"soak": None}, "no --soak: expected --soak 1800s or more", id="no-soak"),
        pytest.param({"soak": "29m"}, "--soak 29m: expected --soak 1800s or more", id="short-soak"),
    ],
)
def test_a_value_that_no_certificate_allows_is_named(given_values, expected):
    assert wrong(**given_values).startswith(expected)


# The fingerprint


def test_the_fingerprint_has_every_option_but_for_those_that_are_left_out(parsed):
    """The fingerprint contains every option except for the excluded ones, so also each new option.
    pytest knows the names of all excluded ones."""
    config = parsed("-q")
    left_out = data_file.load_key("fingerprinted-options.toml", "left_out", frozenset[str])
    known = {*vars(config.option)}
    for dest in known:
        value = ["another value"] if isinstance(getattr(config.option, dest), list) else "another"
        assert bool(fingerprinted(with_value(config, dest, value))) == (dest not in left_out), dest
    own = {name.lstrip("-").replace("-", "_") for name in own_options.every()}
    in_it = own - left_out
    assert {"rounds", "depths", "engine_debug", "exam", "rounding", "reference", "ab"} <= in_it


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param((), {}, id="none"),
        pytest.param(("-v", "-k", "health", "--report-dir=x", "tests"), {}, id="shown"),
        pytest.param(("--rounds", "1"), {"--rounds": "1"}, id="rounds"),
        pytest.param(("--soak", "30m"), {"--soak": "30m"}, id="soak"),
        pytest.param(("--ab", "", "X=1"), {"--ab": "'' X=1"}, id="two-values"),
        pytest.param(
            ("-p", "no:skipping", "-p", "no:logging"),
            {"-p": "no:skipping no:logging"},
            id="plugins",
        ),
        pytest.param(("-o", "timeout=1"), {"--override-ini": "timeout=1"}, id="ini"),
        pytest.param(
            ("--benchmark-compare=0001", "--benchmark-compare-fail=median:5%"), {}, id="comparison"
        ),
    ],
)
def test_options_that_change_a_measurement_are_in_the_fingerprint(parsed, words, expected):
    assert fingerprinted(given(parsed(*words))) == expected


def test_sm121_run_itself_names_no_option(parsed):
    assert fingerprinted(given(parsed(*own_tests.words(Path.cwd())))) == {}
