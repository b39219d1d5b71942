"""What a profile requires at each level: gates, answers, loads, the box, the certificate."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from sm121.core.data_file import DataTable, without_retired
from sm121.core.extending import Statement
from sm121.core.profile_fields import (
    LEVELS,
    ConfigurationName,
    Count,
    Dtype,
    Fraction,
    Gate,
    Level,
    Positive,
    Sourced,
)
from sm121.core.verdict import Severity


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
Ability = Literal[
    "parallel_tool_calls", "oracle", "answer_length", "exam", "long_document", "tool_scores"
]


class LogProbabilityTolerance(Statement):
    """Bounds on |log-probability of the server - of the oracle|, in nats, over prompt tokens."""

    max_abs: Positive
    mean_abs: Positive
    #: The same over tokens more likely than not: a sharp bound for coarse dtypes, too.
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


#: What a server's rounding costs, by metric: its unit, and whether higher is better.
PRICES: dict[str, tuple[Literal["nats", "%"], bool]] = {
    "price_kl": ("nats", False),
    "price_likeliest": ("%", True),
    "price_right_answer": ("nats", True),
}


class Price(DataTable):
    """What a server may cost that rounds so."""

    #: All that it rounds beyond the checkpoint, as ``--rounding`` takes it.
    rounding: str = Field(min_length=2)
    #: Of `PRICES`, at a depth too (``price_kl@d8192``).
    gates: tuple[Gate, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _of_prices(self) -> "Price":
        for gate in self.gates:
            unit, higher = PRICES.get(gate.metric.partition("@")[0], ("", False))
            if gate.unit != unit or (gate.minimum is not None) is not higher:
                rows = [
                    f"{n} in {u}: {'minimum' if h else 'at_most'}" for n, (u, h) in PRICES.items()
                ]
                raise ValueError(f"expected one of {'; '.join(rows)}, not {gate.metric}")
        return self


class Score(Statement):
    """A task of lm-evaluation-harness, and what a right server reaches. ``source``: who publishes
    it, and how far below it may be."""

    #: The share of answers that must be right.
    at_least: Annotated[float, Field(gt=0, lt=1)]
    task: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    #: As its results name it.
    metric: str = Field(min_length=1)
    #: On the hub.
    dataset: str = Field(min_length=1)
    effort: Literal["low", "medium", "high"]
    questions: Count
    answer_tokens: Count
    within_s: Positive
    #: Of ``fixtures/scores/TASK.toml`` alone: times that each question is asked by each API.
    tries: Count | None = None


class Band(Statement):
    """Where a mean must lie."""

    low: Positive
    high: Positive

    @model_validator(mode="after")
    def _ordered(self) -> "Band":
        if self.low > self.high:
            raise ValueError(f"expected low <= high, got {self.low:g} and {self.high:g}")
        return self


class Correctness(DataTable):
    """What the correctness level asks and accepts."""

    #: Name of a file of ``fixtures/exams``, or a path: what the model must know.
    exam: str = Field(min_length=1)
    chats: tuple[Chat, ...] = Field(min_length=1)
    max_answer_tokens: Count = 512
    tool_calls: tuple[ToolCall, ...] = ()
    #: Two calls in one turn: a question and the cities that are asked for.
    parallel_question: str = "What is the weather in Paris and in Tokyo?"
    parallel_calls: Annotated[int, Field(ge=2)] = 2
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
    #: What the server rounds beyond the checkpoint, as ``--rounding`` takes it; None: see its path.
    rounding: str | None = Field(default=None, min_length=2)
    #: A price without a row is measured, and not gated.
    prices: tuple[Price, ...] = ()
    #: Configurations that must answer as the one under test does (``--slow``: a start for each).
    same_answers: tuple[ConfigurationName, ...] = ()
    #: Asked by the Python of ``--scores``; those with ``tries`` by the suite itself.
    scores: tuple[Score, ...] = ()
    #: Mean number of tokens of the answers to fixtures/answers/questions.toml.
    mean_answer_tokens: Band | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_old_keys(cls, data: Any) -> Any:
        """Ignore the key that only ``--questions`` used; say where known answers are now."""
        if isinstance(data, dict) and "known_answers" in data:
            raise ValueError(
                "known_answers: expected in the exam, a line each: "
                '{"prompt": "The capital of France is", "begins": " Paris"}. Name the exam: '
                'exam = "FILE.jsonl"'
            )
        return without_retired(data, "accuracy")

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "Correctness":
        for ability, key in (
            ("oracle", "log_probability_tolerance"),
            ("answer_length", "mean_answer_tokens"),
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
    #: Seconds after which a load of counted requests begins no further one, once half of them have
    #: begun. None: all of them are sent. For a profile of slow machines.
    load_s: Sourced | None = None
    #: For how long one short prompt at a time joins those that decode.
    joining_s: Sourced = _chosen(10, "each number that decodes is joined some times")
    #: A server whose running requests get no token for so long hangs.
    stalled_after_s: Sourced = _chosen(60, "longer than the prefill of a batch")
    request_within_s: Sourced = _chosen(600, "no answer of a load takes ten minutes")
    #: How long a client may wait in silence for an answer or an end after a server's stop.
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
        512, "half of a leak of 1 MiB for each request, which must be detected"
    )
    #: Of the machine's memory, in a day at the rate of requests that the load reached.
    memory_growth_per_day: Sourced = _chosen(
        0.05, "what gpt-oss-120b leaves free on a GB10, about a fifth, lasts for four days"
    )
    handles_growth_per_request: Sourced = _chosen(0.1, "a tenth of one leaked for each request")
    #: Less than this available ends the run.
    memory_floor_gib: Sourced = _chosen(2, "with less, a machine of unified memory wedges")


class TimedChats(Statement):
    """Chats timed as users have them: streamed, sampled by the model's settings, to their end."""

    questions: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    #: Tokens of an answer: a shorter one says nothing of the rate, a longer one is cut off.
    at_least: Count = 512
    at_most: Count = 1024
    #: Their rate, by the decode rate of the plan's longest answers beside them; None: not required.
    share: Annotated[float, Field(gt=0, lt=1)] | None = None


class Performance(DataTable):
    """The measuring plan and its gates."""

    prompt_tokens: Count
    generated_tokens: tuple[Count, ...] = Field(min_length=1)
    depths: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    measuring: Measuring = Measuring()
    chats: TimedChats | None = None
    gates: tuple[Gate, ...] = ()


class Regression(DataTable):
    """How much worse than the history a metric may be, as a fraction of it."""

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.05
    #: By name of the metric, where it is not ``threshold``.
    metrics: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(default={})
    #: Rates and times of one build differ by so much from run to run here. It is allowed between
    #: runs, of what ``metrics`` does not name, but not by ``--ab``.
    runs_differ_by: Annotated[float, Field(ge=0, lt=1)] = 0.0
    #: And by so much from start to start: one start in four was 7 % slower on an H200. Whether what
    #: is worse by less is the build's or the start's, one run cannot tell.
    starts_differ_by: Annotated[float, Field(ge=0, lt=1)] = 0.08
    #: How much worse a price of rounding may be than in an earlier run, in its own unit.
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={"price_kl": 0.0005, "price_likeliest": 2.0, "price_right_answer": 0.05}
    )
    #: Whether a price that correctness.prices has may be paid for speed: it is no regression then.
    price_allowed: bool = False
    source: str = Field(min_length=3, default="this project's requirement: 5 %")

    def of_price(self, metric: str) -> float:
        """How much worse that price may be, in its unit; infinite where it may be paid for."""
        return math.inf if self.price_allowed else self.prices.get(metric.partition("@")[0], 0.0)

    def of_starts(self, metric: str, unit: str) -> float:
        """By how much this metric may differ from start to start; 0 of what is no rate or time."""
        is_timed = unit in ("tok/s", "ms", "µs") and metric not in self.metrics
        return self.starts_differ_by if is_timed else 0.0

    def allowed(self, metric: str) -> float:
        """How much worse this metric may be than in an earlier run."""
        return self.metrics.get(metric, max(self.threshold, self.runs_differ_by))

    def of_anchor(self, metric: str) -> float:
        """How much worse its level over several runs may be than its best one: what one run may be
        worse by chance, as a start from another page cache, is no reason for all of them."""
        return min(self.allowed(metric), max(self.threshold, self.runs_differ_by))


class Box(DataTable):
    """What a healthy machine of this architecture shows. None: nothing is known to compare with,
    and the machine is judged by how steady it is."""

    bandwidth_gb_s: Sourced | None = None
    matrix_tflop_s: Sourced | None = None
    #: Between which healthy ones lie: what a gate may ask of the memory before one was measured.
    healthy_gb_s: Band | None = None
    #: Of the SM clock under load.
    sm_clock_mhz: Sourced | None = None
    #: What one shows at least whose clock is not capped.
    sm_clock_uncapped_mhz: Sourced | None = None
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
    #: Axes of that file that stay at their baseline, each with the reason. ``--matrix-axes`` names
    #: a file whose axes are all tried.
    left_out: dict[str, str] = Field(default_factory=dict)
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
    #: Starts that may be spent on finding the smallest failing sets.
    isolation_boots: Annotated[int, Field(ge=0)] = 8

    @model_validator(mode="before")
    @classmethod
    def _without_costs(cls, data: Any) -> Any:
        return without_retired(data, "boot_s", "cell_s")


class Certify(DataTable):
    """What ``--certify`` insists on: levels of which no test may be skipped or deselected. Tests of
    the other levels are left out."""

    levels: tuple[Level, ...]
    box: Literal["QUALIFIED", "any"] = "QUALIFIED"
    path: tuple[Literal["attention", "moe", "kv_layout"], ...] = ("attention", "moe")
    #: The shortest soak (``--soak``) that it takes, in seconds; 0: it asks for none.
    soak_s: Annotated[float, Field(ge=0)] = 0.0

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
    """The severities whose failures count: for the verdict of a run, for one compared with a
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
