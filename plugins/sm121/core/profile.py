"""Profiles: what a target must be and reach, as data.

A profile is one TOML file. It is validated whole when it is loaded; a mistake is reported as one
line that names the file, the key and what was expected.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from sm121.core import architecture, builds, data_file, extending
from sm121.core.architecture import NAMES
from sm121.core.data_file import DataTable, Pattern, compiles
from sm121.core.errors import UsageError
from sm121.core.extending import Statement
from sm121.core.verdict import Severity
from sm121.core.versions import Versions, release, within

SCHEMA_VERSION = 1

Level = Literal["smoke", "kernel", "correctness", "stress", "performance", "regression", "matrix"]
LEVELS: tuple[str, ...] = get_args(Level)
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ConfigurationName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Sourced(Statement):
    """A number and where it comes from. A number without a source is not accepted."""

    value: Positive


class Gate(Statement):
    """Thresholds of one metric. Higher is better for rates, lower for times (``at_most``)."""

    metric: str = Field(pattern=r"^[a-z0-9_]+(@d?\d+)?$")
    unit: Literal["tok/s", "ms", "s", "GiB", "%", "tokens"]
    minimum: float | None = None
    target: float | None = None
    stretch: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _one_direction(self) -> Gate:
        if (self.minimum is None) == (self.at_most is None):
            raise ValueError("expected either minimum (a rate) or at_most (a time), not both")
        grades = [g for g in (self.minimum, self.target, self.stretch) if g is not None]
        if grades != sorted(grades):
            raise ValueError("expected minimum <= target <= stretch")
        return self


class Measuring(DataTable):
    """The part of a profile's ``[performance]`` that says how it is measured."""

    #: Rounds of each cell, before a gate asks for more, and the most that it may ask for.
    rounds: Count = 5
    maximum_rounds: Count = 80
    #: Requests of the shortest length beside the long ones: the second clock needs both.
    short_rounds: Count = 3
    #: Streams at the same time, measured at the first depth; one stream is what all else is of. On
    #: both sides of a graph that is captured (1, 2, 4, 8), and more than are served at once.
    concurrency: tuple[Count, ...] = (2, 5, 8, 10)
    concurrency_rounds: Count = 3
    #: Places of a draft whose acceptance is measured, where the engine speculates.
    draft_positions: tuple[Count, ...] = (1, 2, 3)
    #: Requests that ``--percentiles`` gathers at most for a percentile.
    tail_requests: Count = 473
    #: Ids below this one are plain tokens: o200k_harmony has its special tokens from there on.
    vocabulary: Count = 199_998
    #: How far the second clock may be from the first.
    second_clock_bound: Fraction = 0.02
    #: How much of a measured time may be delays of the client itself.
    client_lag_bound: Fraction = 0.01
    #: How far the rate may move while it is measured.
    drift_bound: Fraction = 0.05
    #: How far the last warm-up requests may be apart.
    warm_bound: Fraction = 0.10
    warm_up_requests: Count = 6
    request_within_s: Positive = 600.0
    silent_within_s: Positive = 60.0


class Model(Statement):
    """The checkpoint. ``id`` is a path, a hub id, or ``canary:bf16`` / ``canary:mxfp4``."""

    id: str = Field(min_length=1)
    #: Of its files, as the fingerprint in verdict.json has it; None: any checkpoint of its shape.
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    served_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")


class Needs(DataTable):
    """What the machine must have before a start is worth its time."""

    memory_gib: Positive | None = None
    disk_gib: Positive | None = None
    #: Accepted entries of FLASHINFER_CUDA_ARCH_LIST; empty means that it is not looked at.
    arch_list: tuple[str, ...] = ()
    #: FlashInfer modules that may be compiled at a start, by their names in
    #: ``fixtures/compilation/jit.toml``. Which of them are is decided by the engine's arguments.
    jit_modules: tuple[str, ...] = ()
    #: What is resident while they are compiled, where GPU and host share one memory.
    weights_gib: Positive | None = None


class EngineSettings(DataTable):
    """How the engine is started and watched. Times in seconds."""

    name: str = Field(default="vllm", pattern=r"^[a-z0-9][a-z0-9-]*$")
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    #: Of a start that compiles nothing: its caches are warm.
    ready_within_s: Sourced
    #: The most that a start may take which compiles: as long as it is seen to do so.
    cold_ready_within_s: Sourced = Sourced(
        value=2700, source="chosen: fused_moe_120 takes 65 minutes of one core, 16 of four"
    )
    #: No log line and no CPU time for so long during start-up means that it hangs.
    stalled_after_s: Positive = 120.0
    #: Time between the polite request to stop and SIGKILL.
    stop_within_s: Positive = 20.0
    #: Start vLLM's own worker with one more log line: what attention resolved to, layer by layer.
    speaking_worker: bool = False
    #: Whether decode steps of the server under test are profiled for their kernel names, and what
    #: becomes of that server: ``keep`` goes on with it; ``restart`` stops it, because what a GPU
    #: profiler leaves behind slows the host's launches and would spoil what is measured later.
    profiler: Literal["off", "keep", "restart"] = "off"
    #: Distribution -> directory. Where that directory exists, the import must come from it.
    checkouts: dict[Literal["vllm", "flashinfer"], str] = Field(default={})
    needs: Needs = Needs()


class ReleaseSetting(DataTable):
    """What an engine is given, in the releases that take it."""

    #: Releases (PEP 440) that this is for.
    versions: Versions = ""
    #: A build of ``fixtures/builds.toml`` that this is for alone.
    build: str | None = None
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    source: str = Field(min_length=3)

    @field_validator("build")
    @classmethod
    def _is_a_row(cls, build: str | None) -> str | None:
        rows = [row.name for row in builds.shipped()]
        if build is not None and build not in rows:
            raise ValueError(f"expected a build of builds.toml ({', '.join(rows)}), got {build!r}")
        return build

    def fits(
        self,
        identity: str | None,
        options: Collection[str] | None = None,
        more: Sequence[str] = (),
    ) -> bool:
        """Whether an engine takes this.

        Args:
            identity: of `builds.identity`.
            options: of the engine's parser. One of an unknown release takes what its parser has;
                where that was not asked, it may take anything.
            more: arguments that it is given beside these.
        """
        if self.build is not None:
            return (row := builds.named(identity)) is not None and row.name == self.build
        if release(identity) is not None:
            return within(identity, self.versions)
        words = (word for word in (*self.arguments, *more) if word.startswith("--"))
        return options is None or {re.split("[.=]", word)[0] for word in words} <= {*options}


class PathValues(DataTable):
    """Accepted values of a resolved path. None: any."""

    attention: tuple[str, ...] | None = None
    moe: tuple[str, ...] | None = None
    kv_layout: tuple[str, ...] | None = None
    kv_cache_dtype: tuple[str, ...] | None = None
    dtype: tuple[str, ...] | None = None
    quantization: tuple[str, ...] | None = None
    speculative: tuple[str, ...] | None = None
    load_format: tuple[str, ...] | None = None
    cuda_graphs: bool | None = None
    prefix_caching: bool | None = None
    #: Tokens of context (``--max-model-len``).
    context: int | None = None
    #: The layers that are quantised beyond the checkpoint: all of these, and no others.
    requantised: tuple[str, ...] | None = None
    #: How the experts' kernel treats the activation between its two products.
    moe_variant: tuple[str, ...] | None = None
    #: What these releases do not show, each with the reason: no certificate asks for it.
    not_shown: dict[Literal["attention", "moe", "kv_layout"], str] = Field(default={})


class ConfigurationSetting(ReleaseSetting):
    """What a configuration is in some releases, and what its path must be there."""

    path: PathValues = PathValues()


class Configuration(DataTable):
    """One named server configuration, on top of ``[engine]``."""

    description: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    #: What its path must show, where ``[kernel_path]`` leaves that open.
    path: PathValues = PathValues()
    #: By release, the newest first: the first one whose range has the version counts.
    settings: tuple[ConfigurationSetting, ...] = ()
    #: Of this configuration alone, beside those of ``[performance]``.
    gates: tuple[Gate, ...] = ()

    def at(
        self, identity: str | None, options: Collection[str] | None = None, *, anyhow: bool = False
    ) -> Configuration | None:
        """What it is in an engine (see `ReleaseSetting.fits`); None where no setting has it, or
        ``anyhow`` what the first one has. The path of one whose release is not known may be that of
        any."""
        if not self.settings:
            return self
        fitting = [each for each in self.settings if each.fits(identity, options, self.arguments)]
        fitting = fitting or [*self.settings[: int(anyhow)]]
        if not fitting:
            return None
        setting = next((each for each in fitting if each.build is not None), fitting[0])
        paths = [setting.path] if release(identity) is not None else [e.path for e in fitting]
        return self.model_copy(
            update={
                "arguments": (*self.arguments, *setting.arguments),
                "environment": {**self.environment, **setting.environment},
                "path": self.path.model_copy(update=_any_of(paths)),
                "settings": (),
            }
        )


def _given(table: DataTable) -> dict[str, object]:
    return {name: getattr(table, name) for name in table.model_fields_set}


def _any_of(paths: Sequence[PathValues]) -> dict[str, object]:
    """What all of these paths say something of, with the values of each."""
    if len(paths) == 1:
        return _given(paths[0])
    merged: dict[str, object] = {
        "not_shown": {name: why for path in paths for name, why in path.not_shown.items()}
    }
    for name in set.intersection(*(set(path.model_fields_set) for path in paths)) - {"not_shown"}:
        values = [getattr(path, name) for path in paths]
        if all(value == values[0] for value in values):
            merged[name] = values[0]
        elif all(isinstance(value, tuple) for value in values):
            merged[name] = tuple(dict.fromkeys(item for value in values for item in value))
    return merged


class PathRule(DataTable):
    """Kernel signatures of one choice: what must be seen, and what must not."""

    #: ``configuration`` for rules on the log; ``moe`` or ``attention`` for rules on kernel names: a
    #: pattern on the whole name of the backend that the log resolved, upper and lower case alike.
    when: dict[Literal["configuration", "moe", "attention"], str] = Field(
        min_length=1, max_length=1
    )
    must_see: tuple[Pattern, ...] = ()
    must_not_see: tuple[Pattern, ...] = ()
    #: Where the names are looked for: the start-up log, or kernel names of a profile.
    where: Literal["log", "profile"]
    source: str = Field(min_length=3)


class KernelPathRequirement(PathValues):
    """The resolved path that every configuration of this profile must show."""

    #: Fallbacks that change no kernel, by their id in the signatures, each with the reason.
    accepted_fallbacks: dict[str, str] = Field(default={})
    #: Values that some layers may have beside the others, as ``FIELD=VALUE``, with the reason.
    accepted_also: dict[str, str] = Field(default={})
    source: str = Field(min_length=3)
    rules: tuple[PathRule, ...] = ()


class KnownAnswer(DataTable):
    """A prompt and the text with which its greedy continuation must begin (case-sensitive)."""

    prompt: str = Field(min_length=1)
    begins: str = Field(min_length=1)


class Chat(DataTable):
    """A chat question and what the final answer must contain."""

    question: str = Field(min_length=1)
    contains: str = Field(min_length=1)


class ToolCall(DataTable):
    """A chat question that must be answered by a call of one of the tools in
    ``fixtures/api/tools.json``, and what the answer says when it is told the result."""

    question: str = Field(min_length=1)
    tool: str = Field(min_length=1)
    arguments: dict[str, str]
    result: str = Field(min_length=1)
    answer_contains: str = Field(min_length=1)


#: What a target may not allow. A profile says so, with a reason; such tests are NOT_RUN. Without
#: the oracle a certificate asks for a golden file (``--golden``).
Ability = Literal["parallel_tool_calls", "oracle", "answer_length", "exam", "long_document"]


class LogProbabilityTolerance(Statement):
    """Bounds on |log-probability of the server - of the oracle|, in nats, over prompt tokens."""

    max_abs: Positive
    mean_abs: Positive
    #: The same over the tokens that the oracle holds for more likely than not. Rounding moves those
    #: least, so that coarse dtypes have a sharp bound too.
    likely_max_abs: Positive | None = None
    likely_mean_abs: Positive | None = None


class AgreementBound(Statement):
    """Bounds on what two greedy runs of one prompt may differ by, in nats."""

    #: Of the log-probability of any token that both tell, at one place.
    max_abs: Positive
    #: The same on average over the places of a run.
    mean_abs: Positive
    #: Up to this two tokens are equally likely: either may be chosen. 0: the tokens are equal.
    fork: Annotated[float, Field(ge=0)]


class GoldenBound(AgreementBound):
    """The same against a golden file, which another build or configuration may have made."""

    #: Mean KL divergence of the most likely tokens, in nats.
    mean_divergence: Positive
    #: Share of the tokens that the run under test chooses too.
    top1_at_least: Annotated[float, Field(gt=0, le=1)]


class RequiredShare(Statement):
    """A share of answers that must be right."""

    at_least: Annotated[float, Field(gt=0, lt=1)]


class Band(Statement):
    """Where a mean must lie."""

    low: Positive
    high: Positive

    @model_validator(mode="after")
    def _ordered(self) -> Band:
        if self.low > self.high:
            raise ValueError(f"expected low <= high, got {self.low:g} and {self.high:g}")
        return self


class Correctness(DataTable):
    """What the correctness level asks and accepts."""

    known_answers: tuple[KnownAnswer, ...] = Field(min_length=1)
    chats: tuple[Chat, ...] = Field(min_length=1)
    max_answer_tokens: Count = 512
    tool_calls: tuple[ToolCall, ...] = ()
    #: Two calls in one turn: a question and the cities that are asked for.
    parallel_question: str = "What is the weather in Paris and in Tokyo?"
    parallel_calls: Annotated[int, Field(ge=2)] = 2
    #: Name of a file of ``fixtures/exams``, or a path: what the model must know.
    exam: str | None = Field(default=None, min_length=1)
    #: pass^k: each chat and tool call is asked so often, and every answer must hold.
    repeats: Count = 3
    #: What the target of this profile does not allow, each with the reason.
    cannot: dict[Ability, str] = Field(default={})
    #: By dtype of the engine; a dtype that is absent is not compared with the oracle.
    log_probability_tolerance: dict[Dtype, LogProbabilityTolerance] = Field(default={})
    #: By dtype: one server, asked the same in another way.
    agreement: dict[Dtype, AgreementBound] = Field(default={})
    #: By dtype: against a golden file.
    golden: dict[Dtype, GoldenBound] = Field(default={})
    #: Configurations that must answer as the one under test does (``--slow``: a start for each).
    same_answers: tuple[ConfigurationName, ...] = ()
    #: Of the questions of ``--questions``.
    accuracy: RequiredShare | None = None
    #: Mean number of tokens of the answers to fixtures/answers/questions.toml.
    mean_answer_tokens: Band | None = None

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Correctness:
        for ability, key in (
            ("oracle", "log_probability_tolerance"),
            ("answer_length", "mean_answer_tokens"),
            ("exam", "exam"),
        ):
            if ability in self.cannot and getattr(self, key):
                raise ValueError(f"expected cannot.{ability} or {key}, not both")
        return self


def _chosen(value: float, why: str) -> Sourced:
    return Sourced(value=value, source=f"chosen: {why}")


class StressSizes(DataTable):
    """Sizes of the stress level, and what is allowed under load."""

    sequential_requests: Sourced
    concurrent_requests: Sourced
    load_requests: Sourced
    load_concurrency: Sourced
    long_generation_tokens: Sourced
    #: Of the whole, and in GB (10**9 bytes): the smaller of the two is the limit.
    memory_growth_fraction: Sourced
    memory_growth_gb: Sourced
    #: Tokens of each answer of the loads.
    answer_tokens: Sourced = _chosen(32, "short answers, so that requests come and go")
    #: Requests of each process of arrival, and how many come in a second.
    mixed_requests: Sourced = _chosen(40, "enough to have some of each kind")
    arrivals_per_s: Sourced = _chosen(4, "more than are served at once, fewer than wait for ever")
    #: For how long one short prompt at a time joins those that decode.
    joining_s: Sourced = _chosen(10, "each number that decodes is joined some times")
    #: A server whose running requests get no token for so long hangs.
    stalled_after_s: Sourced = _chosen(60, "longer than the prefill of a batch")
    request_within_s: Sourced = _chosen(600, "no answer of a load takes ten minutes")
    #: How long a client may wait in silence after the server was told to stop, until it has an
    #: answer, an error, or its connection is closed.
    stop_learned_within_s: Sourced = _chosen(
        10, "longer than a step and a close take; a proxy's patience with a silent server is 30 s"
    )
    #: The slowest request of a load over its median.
    tail_factor: Sourced = _chosen(10, "a queue makes some slower, not ten times")
    #: A request that took no longer than so many seconds is no slow one.
    tail_floor_s: Sourced = _chosen(2, "what a garbage collection or another process takes away")
    #: How much of the throughput may be lost after the load.
    throughput_drop: Sourced = _chosen(0.1, "twice the noise of a quiet machine")
    memory_growth_kib_per_request: Sourced = _chosen(
        512, "half of a leak of 1 MiB for each request, which must be noticed"
    )
    handles_growth_per_request: Sourced = _chosen(0.1, "a tenth of one leaked for each request")
    #: Less than this available ends the run.
    memory_floor_gib: Sourced = _chosen(2, "with less, a machine of unified memory wedges")


class Performance(DataTable):
    """The measuring plan and its gates."""

    prompt_tokens: Count
    generated_tokens: tuple[Count, ...] = Field(min_length=1)
    depths: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    measuring: Measuring = Measuring()
    gates: tuple[Gate, ...] = ()


class Regression(DataTable):
    """How much worse than the history a metric may be, as a fraction of it."""

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.05
    #: By name of the metric, where it is not ``threshold``.
    metrics: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(default={})
    #: Rates and times of one build differ by so much from run to run on this machine. It is allowed
    #: between runs, of what ``metrics`` does not name. ``--ab``, whose starts take turns, does
    #: without.
    runs_differ_by: Annotated[float, Field(ge=0, lt=1)] = 0.0
    source: str = Field(min_length=3, default="MXFP4 v2 benchmark plan, level 5: 5 %")

    def allowed(self, metric: str) -> float:
        """How much worse this metric may be than in an earlier run."""
        return self.metrics.get(metric, max(self.threshold, self.runs_differ_by))


class Box(DataTable):
    """What a healthy machine of this architecture shows. None: nothing is known to compare with,
    and the machine is judged by how steady it is."""

    bandwidth_gb_s: Sourced | None = None
    matrix_tflop_s: Sourced | None = None
    #: Between which healthy ones lie: what a gate may ask of the memory before one was measured.
    healthy_gb_s: Band | None = None
    #: Of the SM clock under load.
    sm_clock_mhz: Sourced | None = None
    memory_available_gib: Sourced | None = None
    #: Whether a healthy one reaches its power limit under load, as GPUs of data centres do. Where
    #: it does not, a cap is a defect.
    runs_at_its_power_limit: bool = True
    #: (third quartile - first quartile) / median of repeated readings.
    max_spread: Annotated[float, Field(gt=0)] = 0.25
    #: Between the readings before and after the measurements.
    max_drift: Annotated[float, Field(gt=0)] = 0.25
    #: Share of the CPU that other processes take.
    max_other_load: Annotated[float, Field(gt=0, le=1)] = 0.25
    #: How far above bandwidth / bytes per token a rate may be before it is called impossible.
    roofline_tolerance: Annotated[float, Field(ge=1)] = 1.15


class MatrixPlan(DataTable):
    """How the matrix level goes about it; the axes themselves are a file of ``fixtures/matrix``."""

    #: Name of a shipped file, or a path.
    axes: str = Field(min_length=1)
    #: Values of how many axes are combined in every way.
    strength: Count = 2
    #: Of fixtures/answers/prompts.toml, by name; empty: all of them. And how much of each answer.
    prompts: tuple[str, ...] = ()
    answer_tokens: Count = 24
    stress_requests: Count = 8
    #: The performance sample of a cell: one stream, so many rounds.
    prompt_tokens: Count = 128
    generated_tokens: Count = 32
    rounds: Annotated[int, Field(ge=2)] = 6
    short_rounds: Annotated[int, Field(ge=0)] = 3
    warm_up_requests: Count = 4
    drift_bound: Annotated[float, Field(gt=0, lt=1)] = 0.05
    second_clock_bound: Annotated[float, Field(gt=0, lt=1)] = 0.05
    #: How much less than the baseline's a rate may be, where the axes say nothing else.
    may_be_slower: Sourced
    #: A start and the checks after it, before any was timed on this machine.
    boot_s: Sourced
    cell_s: Sourced
    #: Starts that may be spent on finding the smallest failing sets.
    isolation_boots: Annotated[int, Field(ge=0)] = 8


class Certify(DataTable):
    """What ``--certify`` insists on: levels of which no test may be skipped or deselected. Tests of
    the other levels are left out."""

    levels: tuple[Level, ...]
    box: Literal["QUALIFIED", "any"] = "QUALIFIED"
    path: tuple[Literal["attention", "moe", "kv_layout"], ...] = ("attention", "moe")

    @field_validator("levels")
    @classmethod
    def _prove_something(cls, levels: tuple[Level, ...]) -> tuple[Level, ...]:
        if "smoke" not in levels or len({*levels}) < 2:
            others = ", ".join(level for level in LEVELS if level != "smoke")
            raise ValueError(
                "expected smoke, which proves that a server runs, and at least one level that "
                f"measures or compares ({others}); got {', '.join(levels) or 'none'}"
            )
        return levels


class Severities(DataTable):
    """The severities whose failures count: for the verdict of a run, for one that is held against a
    trusted run (``--against``), and for a certificate. Failures of others are listed."""

    verdict: tuple[Severity, ...] = (Severity.BLOCKER, Severity.CONTRACT)
    against: tuple[Severity, ...] = (Severity.BLOCKER, Severity.CONTRACT)
    certificate: tuple[Severity, ...] = (Severity.BLOCKER, Severity.CONTRACT)

    @field_validator("*")
    @classmethod
    def _blockers(cls, needed: tuple[Severity, ...]) -> tuple[Severity, ...]:
        if Severity.BLOCKER not in needed:
            raise ValueError(f"expected blocker among them; got {', '.join(needed) or 'none'}")
        return needed


class Rate(DataTable):
    """How fast a server is behind so many tokens, one stream: tokens a second."""

    depth: Annotated[int, Field(ge=0)]
    prefill: Positive
    decode: Positive


class Costs(DataTable):
    """What a run costs where none was timed: for `sm121 plan` alone, never for a verdict."""

    start_s: Sourced
    #: One check of the kernels' numerics.
    kernel_check_s: Sourced
    #: Of an answer that the model ends itself.
    answer_tokens: Sourced
    #: The rate of eight streams together over that of one.
    gain_of_eight: Sourced
    #: At two depths: the time of a token grows evenly with the tokens before it.
    rates: tuple[Rate, Rate]
    rates_source: str = Field(min_length=3)

    def prompt_s(self, tokens: float) -> float:
        """Seconds until a prompt of so many tokens is computed."""
        start, slope = self._line("prefill")
        return tokens * (start + slope * tokens / 2)

    def token_s(self, depth: float) -> float:
        """Seconds of a generated token behind so many."""
        start, slope = self._line("decode")
        return start + slope * depth

    def gain(self, streams: int) -> float:
        """The rate of so many streams together over that of one."""
        return 1 + (self.gain_of_eight.value - 1) * (min(streams, 8) - 1) / 7

    def _line(self, kind: Literal["prefill", "decode"]) -> tuple[float, float]:
        one, other = self.rates
        slope = (1 / getattr(other, kind) - 1 / getattr(one, kind)) / (other.depth - one.depth)
        return 1 / getattr(one, kind) - slope * one.depth, slope


class PlanRow(DataTable):
    """What ``--plan NAME`` asks of all that there is. What it does not say is asked whole."""

    purpose: str = Field(min_length=3)
    levels: tuple[Level, ...] = Field(default=get_args(Level), min_length=1)
    #: Of a level only these tests: names, in which ``*`` is any text, or names of markers.
    tests: dict[Level, tuple[Annotated[str, Field(min_length=1)], ...]] = Field(default={})
    #: Some of ``[performance]``, and of its ``measuring``.
    depths: tuple[int, ...] | None = Field(default=None, min_length=1)
    generated_tokens: tuple[int, ...] | None = Field(default=None, min_length=1)
    concurrency: tuple[int, ...] | None = None
    rounds: Count | None = None

    @model_validator(mode="after")
    def _tests_of_its_levels(self) -> PlanRow:
        if strange := [level for level in self.tests if level not in self.levels]:
            raise ValueError(f"tests.{strange[0]}: expected a level of its levels")
        return self

    def asks(self, level: str, name: str, markers: Collection[str]) -> bool:
        """Whether it asks a test, by its level, its name without parameters, and its markers."""
        chosen = self.tests.get(level)  # type: ignore[call-overload]
        return level in self.levels and (
            chosen is None or any(named(entry, name, markers) for entry in chosen)
        )


def named(entry: str, name: str, markers: Collection[str]) -> bool:
    """Whether an entry of a plan's ``tests`` names a test."""
    return entry in markers or fnmatch.fnmatchcase(name, entry)


#: The plan of that name is the suite's own, and asks all that there is.
FULL = "full"
_FULL = PlanRow(purpose="all that there is; a certificate needs it")


class Profile(DataTable):
    """What a target must be and reach."""

    schema_version: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    #: The profile that this one is made from: a shipped one, or a path from this file; and the keys
    #: of that one which this one does not have. What resolved counts, not how it was written.
    extends: str | None = Field(default=None, exclude=True)
    without: tuple[str, ...] = Field(default=(), exclude=True)
    description: str
    arch: str
    model: Model
    engine: EngineSettings
    #: The configuration that is judged, and the one that must still work beside it. Of ``fastest``
    #: the first one that the build has is judged instead.
    under_test: str
    baseline: str
    fastest: tuple[ConfigurationName, ...] = ()
    #: The configuration whose own gates are asked, since it was named (`judging`). None: those of
    #: ``[performance]``, which are asked of every build.
    question: str | None = Field(default=None, exclude=True)
    configurations: dict[ConfigurationName, Configuration] = Field(min_length=1)
    #: Those that the engine which is judged cannot have (`judging`).
    lacking: dict[ConfigurationName, Configuration] = Field(default={}, exclude=True)
    kernel_path: KernelPathRequirement
    correctness: Correctness
    stress: StressSizes
    performance: Performance
    regression: Regression = Regression()
    box: Box | None = None
    matrix: MatrixPlan | None = None
    #: By what they are for, beside ``full``.
    plans: dict[ConfigurationName, PlanRow] = Field(default={})
    costs: Costs | None = None
    certify: Certify
    severities: Severities = Severities()
    #: Seconds that a single test of a level may take before pytest-timeout ends it.
    test_timeout_s: dict[Level, Positive]

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        if self.arch not in NAMES:
            raise ValueError(f"arch: expected one of {', '.join(NAMES)}, got {self.arch!r}")
        named = [("under_test", self.under_test), ("baseline", self.baseline)]
        named += [("correctness.same_answers", name) for name in self.correctness.same_answers]
        named += [("fastest", name) for name in self.fastest]
        for rule in self.kernel_path.rules:
            keys = {"log": ("configuration",), "profile": ("moe", "attention")}[rule.where]
            if not rule.when.keys() & {*keys}:
                raise ValueError(
                    f"kernel_path.rules: a rule on the {rule.where} is chosen by "
                    f"{' or '.join(f'when.{key}' for key in keys)}, got {rule.when}"
                )
            compiles(rule.when.get("moe", rule.when.get("attention", "")))
            if (name := rule.when.get("configuration")) is not None:
                named.append(("kernel_path.rules: when.configuration", name))
        for key, name in named:
            if name not in self.configurations:
                known = ", ".join(self.configurations)
                raise ValueError(f"{key}: expected one of [configurations] ({known}), got {name!r}")
        missing = [level for level in LEVELS if level not in self.test_timeout_s]
        if missing:
            raise ValueError(f"test_timeout_s: expected every level, {missing[0]} is missing")
        metrics = [gate.metric for gate in self.performance.gates]
        for name, own in (("", None), *self.configurations.items()):
            place = f"configurations.{name}.gates" if own else "performance.gates"
            each = [gate.metric for gate in own.gates] if own else metrics
            if doubled := sorted({metric for metric in each if each.count(metric) > 1}):
                raise ValueError(f"{place}: {', '.join(doubled)} given twice")
        self._refuse_wrong_plans()
        metrics += [gate.metric for own in self.configurations.values() for gate in own.gates]
        if metrics and "performance" not in self.certify.levels:
            raise ValueError(
                "certify.levels: expected performance, too: a certificate needs a number for each "
                f"of performance.gates ({metrics[0]}); got {', '.join(self.certify.levels)}"
            )
        return self

    def _refuse_wrong_plans(self) -> None:
        own = self.performance
        for name, row in self.plans.items():
            if name == FULL:
                raise ValueError(f"plans.{FULL}: expected another name: {FULL} is {_FULL.purpose}")
            for key, asked, known in (
                ("depths", row.depths, own.depths),
                ("generated_tokens", row.generated_tokens, own.generated_tokens),
                ("concurrency", row.concurrency, own.measuring.concurrency),
            ):
                if strange := sorted({*(asked or ())} - {*known}):
                    shown = ", ".join(map(str, known))
                    raise ValueError(
                        f"plans.{name}.{key}: expected some of [performance]'s ({shown}), "
                        f"got {strange[0]}"
                    )

    def plan(self, name: str) -> PlanRow:
        """The plan of that name.

        Raises:
            UsageError: the profile has none; names those that it has.
        """
        plans = {**self.plans, FULL: _FULL}
        if name not in plans:
            raise UsageError(
                f"--plan {name}: expected one of profile {self.name}: {', '.join(plans)}"
            )
        return plans[name]

    def judging(
        self,
        configuration: str | None = None,
        identity: str | None = None,
        options: Collection[str] | None = None,
    ) -> Profile:
        """The profile as one configuration is judged by it, with what each one is in an engine. A
        configuration that was named is held against its own gates, where it has some, in place of
        the rates of ``[performance]``; else those come first, which are asked of every build.

        Args:
            configuration: default: the fastest that the engine has, else ``under_test``.
            identity: of `builds.identity`.
            options: of the engine's parser, where it was asked.

        Raises:
            UsageError: there is no such configuration, or that engine cannot have it.
        """
        named = self.configurations.get(configuration or "")
        may_have_it = options is None and any(
            builds.may_be(identity, each.build) for each in (named.settings if named else ())
        )
        resolved = {
            key: own.at(identity, options, anyhow=may_have_it and key == configuration)
            for key, own in self.configurations.items()
        }
        fastest = (name for name in self.fastest if resolved.get(name) is not None)
        name = configuration or next(fastest, self.under_test)
        if name not in self.configurations:
            names = ", ".join(self.configurations)
            raise UsageError(
                f"--configuration {name}: expected one of profile {self.name}: {names}"
            )
        for key in (name, self.baseline):
            if resolved[key] is None:
                raise UsageError(self._lacks(key, identity, resolved))
        own, project = self.configurations[name].gates, self.performance.gates
        first, second = (project, own)
        if configuration is not None and own:
            first, second = own, tuple(gate for gate in project if gate.at_most is not None)
        metrics = [gate.metric for gate in first]
        gates = (*first, *(gate for gate in second if gate.metric not in metrics))
        return self.model_copy(
            update={
                "under_test": name,
                "question": name if own and configuration is not None else None,
                "configurations": {key: each for key, each in resolved.items() if each is not None},
                "lacking": self.lacking
                | {
                    key: each.at(identity, options, anyhow=True)
                    for key, each in self.configurations.items()
                    if resolved[key] is None
                },
                "performance": self.performance.model_copy(update={"gates": gates}),
            }
        )

    def _lacks(
        self,
        name: str,
        identity: str | None,
        resolved: Mapping[str, Configuration | None],
    ) -> str:
        """Why an engine cannot have a configuration, and which ones it has."""
        needs = [
            next(f"{row.title} ({', '.join(row.options)})" for row in builds.shipped()
                 if row.name == each.build)
            if each.build is not None
            else f"{self.engine.name} {each.versions}"
            for each in self.configurations[name].settings
        ]  # fmt: skip
        row = builds.named(identity)
        engine = f"{self.engine.name} {identity or 'of a release that is not known'}"
        has = ", ".join(key for key, each in resolved.items() if each is not None)
        return (
            f"profile {self.name}, configuration {name}: expected {' or '.join(needs)}; this is "
            f"{engine if row is None else f'{row.title}, {engine}'}, which has {has}"
        )

    def path_of(self, configuration: str, requested: Collection[str] = ()) -> KernelPathRequirement:
        """What the path of a configuration must show; of one that is not the profile's, what holds
        for all.

        Args:
            requested: values of the path that the server was asked for by name. What the profile
                says of them for all configurations does not hold then; what this one promises does.
        """
        own = {**self.lacking, **self.configurations}.get(configuration)
        required = self.kernel_path.model_copy(update=dict.fromkeys(requested))
        return required.model_copy(update=_given(own.path) if own is not None else {})

    @property
    def asks(self) -> str | None:
        """Another question than the project's, in words; None where the project's own is asked."""
        if self.question is None:
            return None
        held = next(gate for gate in self.performance.gates if gate.minimum is not None)
        return (
            f"is it as fast as configuration {self.question} has been "
            f"({held.metric} at least {held.minimum:g} {held.unit})"
        )

    def gate(self, metric: str) -> Gate | None:
        """The gate of a metric, or None where the profile sets none."""
        return next((g for g in self.performance.gates if g.metric == metric), None)


def shipped() -> dict[str, Traversable]:
    """The profiles that come with the suite, by name."""
    return data_file.shipped("profiles")


def for_architecture(arch: str, engine: str = "vllm") -> str:
    """Name of the shipped profile for an architecture and an engine: the one that extends none of
    that engine.

    Raises:
        UsageError: the suite ships none for it.
    """
    for name in shipped():
        found = load(name)
        parent = None if found.extends is None else load(found.extends).engine.name
        if found.arch == arch and found.engine.name == engine != parent:
            return name
    raise UsageError(
        f"no profile is shipped for {arch} and {engine}; give one with --profile NAME|PATH "
        f"(shipped: {', '.join(shipped())})"
    )


def expected(given: Profile | None, arch: str | None, engine: str = "vllm") -> Profile:
    """The profile that a run will have, before its target is resolved: the one that was given, else
    that of an architecture (default: this machine's), else the CPU's."""
    if given is not None:
        return given
    try:
        name = for_architecture(arch or architecture.detect().name or architecture.CPU, engine)
    except UsageError:  # said again, to the user, when the target is resolved
        name = for_architecture(architecture.CPU)
    return load(name)


def load(name_or_path: str) -> Profile:
    """Load a profile by the name of a shipped one or by path, with what it extends.

    Raises:
        UsageError: there is no such profile, or it is not valid.
    """
    return _load(name_or_path, "--profile", ())


def _load(name_or_path: str, asked_by: str, children: tuple[str, ...]) -> Profile:
    own, origin = data_file.chosen_table(name_or_path, "profiles", asked_by, "profile")
    if "extends" not in own and "without" not in own:
        return data_file.validated(own, origin, Profile)
    key = f"{origin}: key extends:"
    if not isinstance(extends := own.get("extends"), str):
        raise UsageError(f"{key} expected the name or path of a profile, got {extends!r}")
    if "name" not in own:
        raise UsageError(f"{origin}: key name: required key is missing: expected a name of its own")
    if origin in children:
        chain = " -> ".join([*children[children.index(origin) :], origin])
        raise UsageError(f"{key} expected no circle, got {chain}")
    place = extends if extends in shipped() else str(Path(name_or_path).parent / extends)
    parent = _load(os.path.normpath(place), key, (*children, origin))
    merged = extending.extended(parent, own, origin)
    _narrow_plans(merged, own)
    if "under_test" in own and "fastest" not in own:
        merged["fastest"] = []  # whoever says what is judged means it
    return data_file.validated(merged, origin, Profile)


def _narrow_plans(merged: dict[str, Any], own: dict[str, Any]) -> None:
    """Leave out of the parent's plans what its child does not measure."""
    measured = merged.get("performance", {})
    sizes = {**measured, **measured.get("measuring", {})}
    for name in {*merged.get("plans", {})} - {*own.get("plans", {})}:
        row = merged["plans"][name]
        for key in ("depths", "generated_tokens", "concurrency"):
            if row.get(key) and key in sizes:
                row[key] = [size for size in row[key] if size in sizes[key]] or sizes[key]
