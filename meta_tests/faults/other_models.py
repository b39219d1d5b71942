"""Faults of a served Qwen3 and a served Llama, and which check detects each without an oracle.

`python -m meta_tests.faults.other_models` serves the two small models of
`meta_tests/data/small-models` by the real vLLM on the CPU, and does what a user does: it writes a
profile with `sm121 init-profile`, makes a trusted run with a golden file, and repeats the run on
the unchanged server and with each fault. It writes docs/tables/other-models.md, and continues where
it was stopped.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meta_tests.faults import catalogue_rows
from meta_tests.folders import DATA, FAKES, IN_VLLM, ROOT
from sm121.core.configuration import ServerConfiguration, environment_items
from sm121.core.server import Server
from sm121.core.verdict import Verdict
from sm121.engines.managed import ManagedServer
from sm121.engines.starting import StartLimits
from sm121.engines.vllm import Vllm
from sm121.run import verdict_file
from sm121.run.verdict_file import VerdictFile

TABLE = ROOT / "docs" / "tables" / "other-models.md"
STATE = ROOT / ".cache" / "other-models"
#: The name of a run without a fault.
CLEAN = "nothing"
#: The check that compares a run with the golden file of the trusted run.
GOLDEN = "test_answers_agree_with_the_golden_file"
#: The arguments for the parsers of each family of models.
FAMILIES = {
    "qwen3": (
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--reasoning-parser", "qwen3"),
    ),
    "llama": (),
}
_ARGUMENTS = (
    *("--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "8", "--enforce-eager"),
    *("--num-gpu-blocks-override", "192"),
    # The worker is in the engine core, and the engine core is forked from the API server, because
    # this starts faster.
    *("--distributed-executor-backend", "uni"),
)
_NGRAMS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
_SPECULATING = (
    *("--speculative-config", _NGRAMS),
    *("--worker-extension-cls", "speculation_saboteur.Saboteur"),
)
#: For each family, a special token that no answer contains. It replaces the token that ends an
#: answer.
_NEVER = {"qwen3": "<|endoftext|>", "llama": "<think>"}


def wrong_rope(checkpoint: Path) -> None:
    """Change the base of the rotary embedding."""
    _edit(checkpoint / "config.json", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})


def one_scale(checkpoint: Path) -> None:
    """Scale one projection of one layer."""
    import safetensors.torch  # this also imports torch, which tests of the table do not need

    file = checkpoint / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.5
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def another_template(checkpoint: Path) -> None:
    """Begin the assistant's turn like a turn of the user."""
    file = checkpoint / "chat_template.jinja"
    head, generation, rest = file.read_text("utf-8").rpartition("if add_generation_prompt")
    assert "assistant" in rest
    file.write_text(head + generation + rest.replace("assistant", "user"), "utf-8")


def dropped_stop(checkpoint: Path) -> None:
    """Configure another token as the end of an answer."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    text = _NEVER[config["model_type"]]
    tokens = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    # The text must already have an id: a new token would get an id beyond the model's vocabulary.
    (number,) = (token["id"] for token in tokens if token["content"] == text)
    for name in ("generation_config.json", "config.json"):
        _edit(checkpoint / name, eos_token_id=number)
    _edit(checkpoint / "tokenizer_config.json", eos_token=text)


def _edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **changes}), "utf-8")


@dataclass(frozen=True)
class Fault:
    """A fault of a server, caused by the checkpoint that it reads or by its worker."""

    name: str
    change: Callable[[Path], None] | None = None
    #: By which fraction each forward pass takes longer.
    slowed_by: float = 0.0
    #: The name of a fault of `speculation_saboteur.py`.
    drafts: str = ""
    #: Further arguments of llama-server.
    arguments: tuple[str, ...] = ()
    #: Whether llama-server is built without AVX.
    is_slower_build: bool = False


@dataclass(frozen=True)
class Group:
    """Faults that the same checks can detect, and a trusted run of these checks."""

    name: str
    faults: tuple[Fault, ...]
    #: The arguments with which pytest selects the checks.
    checks: tuple[str, ...]
    #: Whether the trusted run records a golden file.
    golden: bool = False
    #: Whether the server speculates with n-grams.
    speculates: bool = False


GROUPS = (
    Group(
        name="answers",
        faults=(
            Fault("wrong base of the rotary embedding", wrong_rope),
            Fault("one projection of one layer scaled by 1.5", one_scale),
            Fault("another template: the assistant's turn begins as a user's", another_template),
            Fault("dropped stop: another token ends an answer", dropped_stop),
        ),
        checks=(
            *("--plan", "quick"),
            *("tests/test_smoke.py", "tests/test_kernel.py", "tests/test_correctness.py"),
        ),
        golden=True,
    ),
    Group(
        name="rates",
        faults=(Fault("a build whose steps take twice as long", slowed_by=1.0),),
        checks=("--plan", "quick", "tests/test_performance.py"),
    ),
    Group(
        name="speculation",
        faults=(
            Fault("lossy speculation: every draft is accepted", drafts="every draft is accepted"),
        ),
        checks=("--plan", "full", "-k", "speculation or drafted or accept"),
        speculates=True,
    ),
)


@dataclass(frozen=True)
class Finding:
    """The result of a run with one fault."""

    family: str
    fault: str
    status: int
    #: The checks that failed and the metrics that are worse.
    detected_by: tuple[str, ...]
    #: The reason that the last line of the run shows.
    reason: str
    seconds: float


@dataclass
class OtherModel:
    """One of the small models, served and judged as a user does it.

    Every server reads its checkpoint from the same path, so a run finds no difference but the
    fault.
    """

    family: str
    group: Group
    #: The folder of the profile, the trusted run, and the checkpoint.
    folder: Path

    @property
    def profile(self) -> Path:
        """The profile that `sm121 init-profile` writes."""
        return self.folder / "mine.toml"

    @property
    def trusted(self) -> Path:
        """The report directory of the trusted run."""
        return self.folder / "trusted"

    @property
    def golden(self) -> Path:
        """The golden file of the trusted run."""
        return self.folder / "golden.json"

    @contextlib.contextmanager
    def serving(self, fault: Fault | None = None) -> Iterator[Server]:
        """Serve the model with a fault; stop the server at the end."""
        checkpoint = self.folder / "checkpoint"
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.copytree(DATA / "small-models" / self.family, checkpoint)
        arguments = (*_ARGUMENTS, *FAMILIES[self.family])
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
            "PYTHONPATH": str(IN_VLLM),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Do not bind threads to cores, and use one thread: threads that wait for each other
            # take minutes on a busy machine.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "SM121_META_PYTHON": sys.executable,
            "SM121_META_SERVER": "forking_vllm.py",
        }
        if self.group.speculates:
            arguments = (*arguments, *_SPECULATING)
            variables["VLLM_SERVER_DEV_MODE"] = "1"
        else:
            arguments = (*arguments, "--worker-extension-cls", "slower_worker.Slower")
            variables["SLOWED_BY"] = str(fault.slowed_by if fault is not None else 0.0)
        if fault is not None and fault.change is not None:
            fault.change(checkpoint)
        configuration = ServerConfiguration(
            name="served",
            engine="vllm",
            python=str(FAKES / "fake_python.py"),
            model=str(checkpoint),
            served_name=f"tiny-{self.family}",
            arguments=arguments,
            environment=environment_items({}, variables),
            speaking_worker=True,
        )
        limits = StartLimits(ready_s=600, stalled_s=180, stop_s=20)
        managed = ManagedServer(configuration, Vllm(), limits, self.folder, "meta-other-models")
        server = managed.start()
        try:
            if fault is not None and fault.drafts:
                _put(server, fault.drafts)
            yield server
        finally:
            managed.stop()

    def init_profile(self, server: Server) -> None:
        """Write the profile, as a user does. On a CPU, it has no gates on rates."""
        words = ["init-profile", "--arch", "cpu", "--no-rates", "--output", str(self.profile)]
        done = self._run(server, [sys.executable, "-m", "sm121", *words])
        assert done.returncode == 0, done.stdout + done.stderr

    def judge(self, server: Server, fault: str) -> Finding:
        """Run the suite on the server. The first run becomes the trusted one."""
        started = time.monotonic()
        words = ["-p", "no:cacheprovider", f"--profile={self.profile}", *self.group.checks]
        if not self.trusted.is_dir():
            report = self.trusted
            golden = "--record-golden"
        else:
            report = Path(tempfile.mkdtemp(dir=self.folder))
            words.append(f"--against={self.trusted}")
            golden = "--golden"
        words.append(f"--report-dir={report}")
        if self.group.golden:
            words.append(f"{golden}={self.golden}")
        done = self._pytest(server, words)
        assert (report / "verdict.json").is_file(), done.stdout[-3000:] + done.stderr
        run = verdict_file.read(report / "verdict.json")
        return Finding(
            family=self.family,
            fault=fault,
            status=done.returncode,
            detected_by=_detected_by(run),
            reason=run.reason,
            seconds=round(time.monotonic() - started, 1),
        )

    def _pytest(self, server: Server, words: list[str]) -> subprocess.CompletedProcess[str]:
        return self._run(server, [sys.executable, "-m", "pytest", *words])

    def _run(self, server: Server, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *given(server)],
            cwd=ROOT,
            env=variables_of(server),
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )


def given(server: Server) -> list[str]:
    """Return the options with which a user names a running server."""
    options = [f"--base-url={server.endpoint.base_url}"]
    if server.log is not None:
        options.append(f"--server-log={server.log}")
    return options


def variables_of(server: Server) -> dict[str, str]:
    """Return this process's environment variables, with the key of a server."""
    return {**os.environ, "SM121_API_KEY": server.endpoint.api_key or ""}


def _put(server: Server, fault: str) -> None:
    with server.endpoint.http(timeout_s=120.0) as http:
        http.post(
            "/collective_rpc", json={"method": "sabotage", "args": [fault]}
        ).raise_for_status()


def _detected_by(run: VerdictFile) -> tuple[str, ...]:
    """Return the checks that fail but did not fail in the trusted run, and the metrics that are
    worse."""
    names = []
    for test in run.tests:
        failed = test.verdict not in (Verdict.PASS, Verdict.NOT_RUN) and not test.excused
        # A check that no longer runs because another check failed detects nothing.
        if failed and not test.is_of_option:
            names.append(test.id.rpartition("::")[2])
    if run.against is not None:
        names += [line.partition(":")[0] for line in run.against.worse]
    return tuple(dict.fromkeys(names))


class State:
    """The findings so far, which are stored in a file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "findings.json"
        self.findings: list[Finding] = []
        if self.file.is_file():
            rows = json.loads(self.file.read_text("utf-8"))
            self.findings = [
                Finding(**{**row, "detected_by": tuple(row["detected_by"])}) for row in rows
            ]

    def has(self, family: str, fault: str) -> bool:
        """Return whether a fault was tried already."""
        return any((each.family, each.fault) == (family, fault) for each in self.findings)

    def keep(self, finding: Finding) -> None:
        """Store a finding, and print it."""
        self.findings.append(finding)
        rows = [asdict(each) for each in self.findings]
        self.file.write_text(json.dumps(rows, indent=1), "utf-8")
        print(f"== {finding}", flush=True)


def try_group(
    served: type[OtherModel],
    family: str,
    group: Group,
    state: State,
    only: str = "",
    deadline: float = math.inf,
) -> None:
    """Make the trusted run of a group, repeat it, and try each fault.

    Each fault needs one start.
    """
    model = served(family, group, state.file.parent / f"{family}-{group.name}")
    intact = f"{CLEAN} ({group.name})"
    if not state.has(family, intact) and time.monotonic() < deadline:
        shutil.rmtree(model.folder, ignore_errors=True)
        model.folder.mkdir(parents=True)
        with model.serving() as server:
            model.init_profile(server)
            state.keep(model.judge(server, f"trusted run ({group.name})"))
            state.keep(model.judge(server, intact))
    for fault in group.faults:
        wanted = only in fault.name and not state.has(family, fault.name)
        if wanted and state.has(family, intact) and time.monotonic() < deadline:
            with model.serving(fault) as server:
                state.keep(model.judge(server, fault.name))


def table(findings: list[Finding]) -> str:
    """Return docs/tables/other-models.md."""
    found = {(finding.fault, finding.family): finding for finding in findings}
    intact = [f"{CLEAN} ({group.name})" for group in GROUPS]
    return catalogue_rows.page(
        "other-models", found=found, intact=intact, groups=GROUPS, families=tuple(FAMILIES),
        golden=GOLDEN,
    )  # fmt: skip


def main() -> int:
    """Try the faults without a result, and write the table.

    The exit status is 1 as long as a result is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--group", default="", metavar="NAME", help="the faults of this group")
    parser.add_argument("--only", default="", metavar="WORD", help="the faults with this word")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no start after them")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    options.state.mkdir(parents=True, exist_ok=True)
    state = State(options.state)
    for family in options.family or FAMILIES:
        for group in GROUPS:
            if options.group in ("", group.name):
                try_group(OtherModel, family, group, state, options.only, deadline)
    whole = True
    for family, group in itertools.product(FAMILIES, GROUPS):
        whole = whole and all(state.has(family, fault.name) for fault in group.faults)
    options.output.write_text(table(state.findings), "utf-8")
    print("whole" if whole else "not whole yet")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
