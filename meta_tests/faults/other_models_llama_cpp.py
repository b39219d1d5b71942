"""Faults of a Qwen3 and a Llama that llama-server serves, and which check detects each.

`python -m meta_tests.faults.other_models_llama_cpp` does with llama-server (`make engines` builds
it) what `other_models.py` does with vLLM: it converts the two small models to GGUF, writes a
profile of the intact server, makes a trusted run, and repeats the run with each fault. It writes
docs/tables/other-models-llama-cpp.md, and continues where it was stopped.
"""

import argparse
import contextlib
import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from meta_tests.faults import catalogue_rows, other_models
from meta_tests.faults.other_models import CLEAN, FAMILIES, GOLDEN, Fault, Finding, State
from meta_tests.folders import DATA, ROOT
from sm121.cli.command import progress
from sm121.core.configuration import ServerConfiguration
from sm121.core.server import Server
from sm121.engines.llama_cpp import LlamaCpp
from sm121.engines.managed import ManagedServer
from sm121.engines.starting import StartLimits
from tools import engines, gguf

TABLE = ROOT / "docs" / "tables" / "other-models-llama-cpp.md"
STATE = ROOT / ".cache" / "other-models-llama-cpp"
#: The words by which llama.cpp splits texts for the tokenizers of `tools/small_models.py`.
_PRE_TOKENIZER = "gpt-2"
#: As in the profile cpu-tiny-gpt-oss-llama-cpp: 4096 tokens for each of 8 slots.
_ARGUMENTS = (
    *("--ctx-size", "32768", "--parallel", "8", "--threads", "1", "--poll", "0", "--jinja"),
    *("--no-webui", "--slot-prompt-similarity", "0", "--top-k", "0", "--top-p", "1"),
    *("--min-p", "0"),
)
_SPECULATING = (
    *("--spec-type", "ngram-simple"),
    *("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "3"),
)
_ANSWERS, _RATES, _SPECULATION = other_models.GROUPS
#: The faults of vLLM's table, as llama-server can have them. It ends an answer at `<|im_end|>` and
#: `<|eot_id|>` even if the checkpoint names another token, so an option drops the stop. An option
#: for benchmarks sets the rate at which drafted tokens are accepted.
GROUPS = (
    replace(
        _ANSWERS,
        faults=(
            *_ANSWERS.faults[:-1],
            Fault("dropped stop: no token ends an answer", arguments=("--ignore-eos",)),
        ),
    ),
    replace(
        _RATES,
        faults=(Fault("a slower build: compiled without AVX", is_slower_build=True),),
    ),
    # The checks of speculation need log-probabilities, which llama-server does not send then.
    replace(
        _SPECULATION,
        checks=_ANSWERS.checks,
        faults=(
            Fault(
                "lossy speculation: every draft is accepted",
                arguments=("--spec-synth-rates", "1,1,1"),
            ),
        ),
    ),
)


@dataclass
class LlamaCppModel(other_models.OtherModel):
    """One of the small models, served by llama-server and judged as a user does it."""

    #: The folder in which `tools.engines` builds.
    builds: Path = ROOT / ".cache" / "engines"

    @contextlib.contextmanager
    def serving(self, fault: Fault | None = None) -> Iterator[Server]:
        """Serve the model with a fault; stop the server at the end."""
        checkpoint = self.folder / f"tiny-{self.family}"
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.copytree(DATA / "small-models" / self.family, checkpoint)
        if fault is not None and fault.change is not None:
            fault.change(checkpoint)
        model = gguf.convert(
            checkpoint, engines.sources(self.builds), self.folder / "model.gguf", progress,
            pre_tokenizer=_PRE_TOKENIZER,
        )  # fmt: skip
        arguments: tuple[str, ...] = _ARGUMENTS
        if self.group.speculates:
            arguments += _SPECULATING
        if fault is not None:
            arguments += fault.arguments
        program = engines.program(self.builds)
        if fault is not None and fault.is_slower_build:
            program = engines.slower_program(self.builds)
        configuration = ServerConfiguration(
            name="served",
            engine="llama-cpp",
            python=str(program),
            model=str(model),
            served_name=f"tiny-{self.family}",
            arguments=arguments,
        )
        limits = StartLimits(ready_s=300, stalled_s=120, stop_s=20)
        managed = ManagedServer(configuration, LlamaCpp(), limits, self.folder, "meta-other-models")
        try:
            yield managed.start()
        finally:
            managed.stop()


def table(findings: list[Finding]) -> str:
    """Return docs/tables/other-models-llama-cpp.md."""
    found = {(finding.fault, finding.family): finding for finding in findings}
    intact = [f"{CLEAN} ({group.name})" for group in GROUPS]
    return catalogue_rows.page(
        "other-models-llama-cpp", found=found, intact=intact, groups=GROUPS,
        families=tuple(FAMILIES), golden=GOLDEN,
    )  # fmt: skip


def main() -> int:
    """Try what is missing, and write the table; the exit status is 1 while a fault is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--group", default="", metavar="NAME", help="the faults of this group")
    options = parser.parse_args()
    builds = ROOT / ".cache" / "engines"
    engines.build(builds, options.jobs)
    if options.group in ("", _RATES.name):
        engines.build(builds, options.jobs, slower=True)
    options.state.mkdir(parents=True, exist_ok=True)
    state = State(options.state)
    for family in options.family or FAMILIES:
        for group in GROUPS:
            if options.group in ("", group.name):
                other_models.try_group(LlamaCppModel, family, group, state)
    whole = True
    for family, group in itertools.product(FAMILIES, GROUPS):
        whole = whole and all(state.has(family, fault.name) for fault in group.faults)
    options.output.write_text(table(state.findings), "utf-8")
    print("whole" if whole else "not whole yet")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
