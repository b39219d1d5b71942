"""The command line: its options, the markers, and the settings that they make."""

from __future__ import annotations

import pytest

from sm121.core import architecture, profile
from sm121.core.errors import UsageError
from sm121.engines import capabilities
from sm121.kernels import registry as kernel_providers
from sm121.matrix import covering
from sm121.run import shards
from sm121.session import settings
from sm121.session.settings import Settings, Worker

#: Markers beside levels and architectures: set by the plugin, or by a test that needs them.
_MARKERS = (
    "applies_to(*names): the architectures that a test is for; 'gpu' means each of them. "
    "Every test of a level has it, on itself or its module",
    "slow(why): takes minutes; left out unless --slow is given",
    "asked_for(option): runs only when that option is given; else it is no test",
    "ability(name): needs a model that can do this; a profile says in [correctness.cannot] "
    "what its model cannot",
    "api_cases: run with each case of fixtures/api/cases.toml as `case`",
    "kernel_cases(group): run with each case of that group of sm121.kernels.cases as `case`",
    "kernel_benchmarks: run with each case of sm121.kernels.benchmark_cases as `case`",
    "ab_run: is there only with --ab A B",
    "xdist_group(name): with pytest-xdist, tests of one name share a worker",
)


def add(parser: pytest.Parser) -> None:
    """Add every option of the suite."""
    group = parser.getgroup("sm121", "SM121 conformance")
    group.addoption("--arch", metavar="NAME", help="architecture of the target (default: detected)")
    group.addoption(
        "--profile",
        metavar="NAME|PATH",
        help="what the target must be and reach (default: by arch)",
    )
    group.addoption(
        "--engine",
        metavar="NAME",
        help="engine to start: vllm (default); with --base-url the engine that listens there "
        f"({', '.join(capabilities.shipped())}; default: recognised by its answers)",
    )
    group.addoption(
        "--engine-python",
        metavar="PATH",
        help="interpreter of the environment that the engine lives in (default: this one)",
    )
    group.addoption(
        "--engine-binary",
        metavar="PATH",
        help="program of an engine that is one, as llama-server (default: on the PATH)",
    )
    group.addoption(
        "--engine-arg",
        metavar="ARG",
        action="append",
        default=[],
        help="passed to the engine; repeatable; write --engine-arg=--flag",
    )
    group.addoption(
        "--engine-env",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="in the engine's environment; repeatable",
    )
    group.addoption(
        "--engine-debug",
        action="store_true",
        help="the engine runs with blocking launches and full stack traces",
    )
    group.addoption(
        "--base-url", metavar="URL", help="attach to a running server; it is never stopped"
    )
    group.addoption("--api-key", metavar="KEY", help="key of the attached server")
    group.addoption(
        "--server-log", metavar="PATH", help="log of the attached server, for its kernel path"
    )
    group.addoption("--model", metavar="PATH|ID", help="the checkpoint (default: the profile's)")
    group.addoption(
        "--served-model-name",
        metavar="NAME",
        help="its name on the server (default: the profile's)",
    )
    group.addoption(
        "--kernel-provider",
        metavar="NAME|MODULE:ATTR",
        help="whose kernels the kernel level tests: "
        f"{', '.join(kernel_providers.NAMES)} or an object of yours (default: torch on a CPU, vllm "
        "for that engine on a GPU)",
    )
    group.addoption(
        "--full-shapes",
        action="store_true",
        help="numerics at all sizes on a CPU too, where the large ones are left out by default",
    )
    group.addoption(
        "--profile-kernels",
        metavar="MODE",
        choices=("auto", "keep", "restart", "off"),
        default="auto",
        help="decode steps of the server under test are profiled for their kernel names; then it "
        "is kept, or restarted so that no number is taken of it (default: auto, as the profile "
        "says); off: not profiled",
    )
    group.addoption(
        "--nsys",
        action="store_true",
        help="start the server under Nsight Systems, keep its report, and read the kernels from it",
    )
    group.addoption(
        "--depths",
        metavar="LIST",
        help="context before the measured prompt, in tokens: 0,4096 (default: the profile's)",
    )
    group.addoption(
        "--rounds",
        metavar="N",
        help="rounds of each measurement before a gate asks for more (default: the profile's)",
    )
    group.addoption(
        "--tails",
        action="store_true",
        help="gather the requests that the gates on percentiles need (--certify does so too)",
    )
    group.addoption(
        "--ab",
        nargs=2,
        metavar=("A", "B"),
        help="compare two configurations (engine arguments, KEY=VALUE, --engine-python PATH, on "
        "top of the one under test; '' for itself) or two URLs",
    )
    group.addoption(
        "--ab-pairs",
        metavar="N",
        help="starts of each side before --ab decides; twice as many at most (default: 3)",
    )
    group.addoption(
        "--hypothesis", metavar="FILE", help="what a feature promised, judged from the --ab run"
    )
    group.addoption(
        "--soak",
        metavar="DURATION",
        help="mixed load for so long, with every check of the stress level: 30s, 10m, 2h",
    )
    group.addoption("--waivers", metavar="PATH", help="failures tolerated by name (default: none)")
    group.addoption(
        "--certify",
        action="store_true",
        help="the merge gate: nothing required may be skipped, deselected or unproven",
    )
    group.addoption(
        "--report-dir",
        metavar="PATH",
        default="conformance-report",
        help="verdict.json, report.html, summary.md, junit.xml and logs (default: "
        "conformance-report); an earlier report is kept under earlier/",
    )
    group.addoption(
        "--configuration",
        metavar="NAME",
        help="which of the profile's configurations is judged (default: the profile's)",
    )
    group.addoption(
        "--reference",
        metavar="PATH",
        help="the checkpoint that the oracle computes from (default: the one that is served)",
    )
    group.addoption(
        "--golden", metavar="PATH", help="compare with the answers of a trusted run (a file)"
    )
    group.addoption(
        "--record-golden", metavar="PATH", help="record the answers of this run as such a file"
    )
    group.addoption(
        "--accuracy",
        metavar="PATH",
        help="questions with known answers: JSONL of prompt, answer, kind",
    )
    group.addoption(
        "--accuracy-baseline",
        metavar="PATH",
        help="accuracy.jsonl of an earlier run, to compare with question by question",
    )
    group.addoption(
        "--slow",
        action="store_true",
        help="also run the tests that take minutes each (FlashInfer's modules compiled by nvcc)",
    )
    group.addoption(
        "--beside-others",
        action="store_true",
        help="measure even while other runs of the suite work here (default: take turns with them)",
    )
    group.addoption(
        "--matrix",
        metavar="N|full|none",
        help="every combination of the values of N axes is in some cell: 1, 2 (pairs), ..., full; "
        "none: no cells (default: the profile's, 2)",
    )
    group.addoption(
        "--matrix-axis",
        metavar="NAME",
        help="one axis against each other one, the others among themselves at strength 1",
    )
    group.addoption(
        "--matrix-build",
        metavar="NAME",
        help="the build whose own knobs are used, as the axes' file names it (default: upstream's)",
    )
    group.addoption(
        "--matrix-axes",
        metavar="NAME|PATH",
        help="the axes (default: the profile's)",
    )
    group.addoption(
        "--resume",
        action="store_true",
        help="go on after the last kernel test and the last cell that the run before ended, "
        "in the same --report-dir",
    )
    group.addoption(
        "--shard",
        metavar="I/N",
        help="run the I-th of N parts; tests of one server configuration are in one part; "
        "`sm121 merge DIR...` makes one verdict of the parts",
    )


def markers() -> list[str]:
    """All markers, as pytest shows them: for levels, for architectures, and the others."""
    return [
        *(f"{name}: tests of the {name} level" for name in profile.LEVELS),
        *(
            f"{name}: tests that apply to {name} (set by applies_to, not by hand)"
            for name in architecture.NAMES
        ),
        "gpu: tests that apply to some GPU architecture",
        *_MARKERS,
    ]


def read(config: pytest.Config) -> Settings:
    """The settings from the command line, validated.

    Raises:
        UsageError: an option is wrong, or contradicts another one.
    """
    given = getattr(config, "workerinput", None)
    worker = None
    if given is not None and "sm121_run" in given:
        worker = Worker(str(given["workerid"]), str(given["sm121_run"]), int(given["workercount"]))
    if (strength := config.getoption("--matrix")) is not None:
        covering.parse_strength(strength)
    shard = shards.parse(config.getoption("--shard"))
    if shard is not None and config.getoption("--certify"):
        raise UsageError("--shard with --certify: a certificate is about a whole run")
    return settings.read(
        config.getoption,
        started_in=config.invocation_params.dir,
        root=config.rootpath,
        worker=worker,
    )


def refuse_a_selection(config: pytest.Config) -> None:
    """Refuse options with which ``--certify`` would not see that tests are missing.

    Tests removed by -m, -k or --deselect are seen, and are reported as gaps.

    Raises:
        UsageError: paths, node ids or options that leave files out were given.
    """
    narrowing = {
        "--ignore": config.option.ignore,
        "--ignore-glob": config.option.ignore_glob,
        "--lf": getattr(config.option, "lf", False),
        "--sw": getattr(config.option, "stepwise", False),
    }
    given = [name for name, value in narrowing.items() if value]
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        given.append("paths or node ids")
    if given:
        raise UsageError(
            f"--certify with {', '.join(given)}: expected a run of all levels; leave these out"
        )
