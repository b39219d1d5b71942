"""A profile's tables about the levels: gates, answers, loads, the box, the certificate."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from sm121.core.data_file import DataTable, refuse_moved, without_retired
from sm121.core.extending import Statement
from sm121.core.measuring_settings import Count, MeasuringSettings, Positive
from sm121.core.metric_name import without_depth
from sm121.core.profile_fields import LEVELS, ConfigurationName, Dtype, Gate, Level, Sourced
from sm121.core.verdict import Severity


class Measuring(DataTable, MeasuringSettings):  # type: ignore[misc] # mypy: DataTable is frozen
    """The part of ``[performance]`` that says how metrics are measured. Times are in seconds."""


class Chat(DataTable):
    """A prompt for a chat, and a text that the final answer must contain."""

    question: str = Field(min_length=1)
    contains: str = Field(min_length=1)


class ToolCall(DataTable):
    """A prompt for a chat to which the model must respond with a tool call."""

    question: str = Field(min_length=1)
    #: The name of the tool in ``fixtures/api/tools.json``.
    tool: str = Field(min_length=1)
    #: The required arguments of the call.
    arguments: dict[str, str]
    #: The result of the call, which is sent to the model.
    result: str = Field(min_length=1)
    #: A text that the answer must contain.
    answer_contains: str = Field(min_length=1)


#: Abilities that a target may lack. A profile lists the missing abilities with reasons, and tests
#: that need them are NOT_RUN. If ``oracle`` is missing, a certificate requires a golden file
#: (``--golden``).
Ability = Literal[
    "chats",
    "parallel_tool_calls",
    "tools",
    "oracle",
    "harmony",
    "answer_length",
    "exam",
    "long_document",
    "tool_scores",
]


class ChatFormat(DataTable):
    """The format of the model's chats. The defaults are gpt-oss's harmony."""

    #: A chat as a text for /v1/completions, in the model's template, up to the answer.
    prompt: str = Field(
        min_length=1,
        default="<|start|>user<|message|>What is the capital of France?<|end|><|start|>assistant",
    )
    #: The id of the token that ends an answer.
    end_token: Annotated[int, Field(ge=0)] = 200_002
    #: Special tokens that must not appear in texts for users, in addition to those of harmony.
    special: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    #: Whether the server separates reasoning from the answer.
    reasoning: bool = True


class LogProbabilityTolerance(Statement):
    """How much log-probabilities of prompt tokens may differ from the oracle's, in nats."""

    max_abs: Positive
    mean_abs: Positive
    #: The largest accepted difference in log-probability of tokens with a probability above one
    #: half. This bound can be small even for coarse dtypes.
    likely_max_abs: Positive | None = None
    likely_mean_abs: Positive | None = None


class AgreementBound(Statement):
    """Bounds on the differences between two greedy runs of one prompt, in nats."""

    #: The largest difference in log-probability of a token that both runs report at one position.
    max_abs: Positive
    #: The largest mean difference over the positions of a run.
    mean_abs: Positive
    #: The runs may choose different tokens if the log-probabilities of these tokens differ by at
    #: most this number. With 0, the tokens must be equal.
    fork: Annotated[float, Field(ge=0)]


class GoldenBound(AgreementBound):
    """Bounds on the differences from a golden file, which another build may have written."""

    #: The largest mean KL divergence, over the most likely tokens, in nats.
    mean_divergence: Positive
    #: The minimum share of positions at which the run under test chooses the golden token.
    top1_at_least: Annotated[float, Field(gt=0, le=1)]


#: For each metric of the accuracy cost of rounding, its unit, and whether a higher value is better.
PRICES: dict[str, tuple[Literal["nats", "%"], bool]] = {
    "price_kl": ("nats", False),
    "price_likeliest": ("%", True),
    "price_right_answer": ("nats", True),
}


class Price(DataTable):
    """The accepted accuracy cost of one rounding."""

    #: The server's rounding in addition to that of the checkpoint, in the syntax of ``--rounding``.
    rounding: str = Field(min_length=2)
    #: Gates on metrics of `PRICES`, with or without a depth (for example ``price_kl@d8192``).
    gates: tuple[Gate, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _of_prices(self) -> "Price":
        for gate in self.gates:
            unit, higher_is_better = PRICES.get(without_depth(gate.metric), ("", False))
            if gate.unit != unit or (gate.minimum is not None) is not higher_is_better:
                raise ValueError(f"expected one of {_accepted_prices()}, got {gate.metric}")
        return self


def _accepted_prices() -> str:
    """Return which metrics, units and thresholds a price may have, for an error message."""
    rows = []
    for metric, (unit, higher_is_better) in PRICES.items():
        threshold = "minimum" if higher_is_better else "at_most"
        rows.append(f"{metric} in {unit}: {threshold}")
    return "; ".join(rows)


class Score(Statement):
    """A task of lm-evaluation-harness, and the score that a correct server reaches.

    ``source`` names the publisher of the score, and why `at_least` is lower than that score.
    """

    #: The minimum share of correct answers.
    at_least: Annotated[float, Field(gt=0, lt=1)]
    #: The name of the task.
    task: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    #: The name of the metric in the results.
    metric: str = Field(min_length=1)
    #: The id of the dataset on the Hugging Face hub.
    dataset: str = Field(min_length=1)
    #: The reasoning effort.
    effort: Literal["low", "medium", "high"]
    #: The number of questions.
    questions: Count
    #: The maximum length of an answer, in tokens.
    answer_tokens: Count
    #: The time limit of the task, in seconds.
    within_s: Positive
    #: The number of tries of each question with each API. It is set only in
    #: ``fixtures/scores/TASK.toml``.
    tries: Count | None = None


class Band(Statement):
    """The range in which the mean of a quantity must be."""

    low: Positive
    high: Positive

    @model_validator(mode="after")
    def _ordered(self) -> "Band":
        if self.low > self.high:
            raise ValueError(f"expected low <= high, got {self.low:g} and {self.high:g}")
        return self


class Correctness(DataTable):
    """The prompts of the correctness level, and their tolerances."""

    #: The exam: the name of a file in ``fixtures/exams``, or a path from the profile's folder.
    exam: str = Field(min_length=1)
    chats: tuple[Chat, ...] = ()
    chat_format: ChatFormat = ChatFormat()
    max_answer_tokens: Count = 512
    tool_calls: tuple[ToolCall, ...] = ()
    #: A prompt to which the model must respond with several tool calls in one turn.
    parallel_question: str = "What is the weather in Paris and in Tokyo?"
    #: The number of calls that ``parallel_question`` requires.
    parallel_calls: Annotated[int, Field(ge=2)] = 2
    #: The number of tries of each chat and tool call, all of which must pass (pass^k).
    repeats: Count = 3
    #: Abilities that the target of this profile lacks, with the reasons.
    cannot: dict[Ability, str] = Field(default={})
    #: For each dtype of the engine, the tolerance against the oracle. Other dtypes are not
    #: compared.
    log_probability_tolerance: dict[Dtype, LogProbabilityTolerance] = Field(default={})
    #: For each dtype, the tolerance between answers of one server to the same prompt, sent in
    #: different ways.
    agreement: dict[Dtype, AgreementBound] = Field(default={})
    #: For each dtype, the tolerance between the answers and a golden file.
    golden: dict[Dtype, GoldenBound] = Field(default={})
    #: The server's rounding in addition to that of the checkpoint, in the syntax of ``--rounding``.
    #: If None, it is derived from the server's kernel path.
    rounding: str | None = Field(default=None, min_length=2)
    #: The accepted accuracy costs of roundings. The cost of any other rounding is measured but not
    #: judged.
    prices: tuple[Price, ...] = ()
    #: Configurations that must give the same answers. They are compared only with ``--slow``,
    #: because each needs a start.
    same_answers: tuple[ConfigurationName, ...] = ()
    #: Published scores of the model. The suite itself runs the tasks that have ``tries``. For the
    #: others, it runs lm-evaluation-harness in the Python of ``--scores``.
    scores: tuple[Score, ...] = ()
    #: The range for the mean length, in tokens, of answers to the prompts in
    #: ``fixtures/answers/questions.toml``.
    mean_answer_tokens: Band | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_keys(cls, data: Any) -> Any:
        """Refuse the keys of earlier releases, with an error that names their new place."""
        place = 'expected in the file of the exam (exam = "FILE.jsonl")'
        begins = '{"prompt": "The capital of France is", "begins": " Paris"}'
        misses = '{"section": "facts", "misses": 2}'
        moved = {
            "known_answers": f"{place}, one line for each: {begins}",
            "accuracy": f"{place}, as the allowed wrong answers of a section: {misses}",
        }
        return refuse_moved(data, moved)

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "Correctness":
        if not self.chats and "chats" not in self.cannot:
            raise ValueError("chats: expected a chat, or a reason in cannot.chats, got neither")
        keys: dict[Ability, str] = {
            "chats": "chats",
            "oracle": "log_probability_tolerance",
            "answer_length": "mean_answer_tokens",
        }
        for ability, key in keys.items():
            if ability in self.cannot and getattr(self, key):
                raise ValueError(f"expected cannot.{ability} or {key}, not both")
        return self


def _chosen(value: float, why: str) -> Sourced:
    """Return a number that this project chose. The reason is given as its source."""
    return Sourced(value=value, source=f"chosen: {why}")


class StressSizes(DataTable):
    """Sizes and limits of the stress level. Times are in seconds."""

    sequential_requests: Sourced
    concurrent_requests: Sourced
    load_requests: Sourced
    load_concurrency: Sourced
    long_generation_tokens: Sourced
    #: The largest growth of memory, as a fraction of the machine's memory. If ``memory_growth_gb``
    #: is smaller, that limit applies.
    memory_growth_fraction: Sourced
    #: The largest growth of memory, in 10**9 bytes. See ``memory_growth_fraction``.
    memory_growth_gb: Sourced
    #: The length of each answer of a load, in tokens.
    answer_tokens: Sourced = _chosen(32, "short answers, so that requests begin and end often")
    #: The number of requests in each arrival process.
    mixed_requests: Sourced = _chosen(40, "enough to have some of each kind")
    #: The mean arrival rate of each arrival process, in requests per second.
    arrivals_per_s: Sourced = _chosen(4, "more than a slow server runs at once, but the queue ends")
    #: The time in seconds after which a load starts no further request, if it has started at least
    #: half of its requests. This limits the load on slow machines. If None, all requests are sent.
    load_s: Sourced | None = None
    #: For how many seconds short prompts are sent, one at a time, while other requests decode.
    joining_s: Sourced = _chosen(10, "enough for prompts to join each number of decoding requests")
    #: If the running requests of a server get no token for this many seconds, the server counts as
    #: hung.
    stalled_after_s: Sourced = _chosen(60, "longer than the prefill of a batch")
    #: The time limit of a request, in seconds.
    request_within_s: Sourced = _chosen(600, "no answer of a load takes ten minutes")
    #: The maximum time until a client notices that a server was stopped, in seconds.
    stop_learned_within_s: Sourced = _chosen(
        10, "longer than a decode step and a close; proxies wait 30 s for a silent server"
    )
    #: The largest ratio of the duration of a load's slowest request to the median duration.
    tail_factor: Sourced = _chosen(10, "waiting in a queue slows a request less than ten times")
    #: A request that takes less than this many seconds never counts as slow.
    tail_floor_s: Sourced = _chosen(2, "longer than a garbage collection, or other work, takes")
    #: The largest loss of throughput after the load, as a fraction.
    throughput_drop: Sourced = _chosen(0.1, "twice the noise of a quiet machine")
    #: The largest growth of memory for each request, in KiB.
    memory_growth_kib_per_request: Sourced = _chosen(
        512, "half of a leak of 1 MiB for each request, which must be detected"
    )
    #: The largest growth of memory, extrapolated from the load to a day, as a fraction of the
    #: machine's memory.
    memory_growth_per_day: Sourced = _chosen(
        0.05, "the free memory beside gpt-oss-120b on a GB10, about a fifth, lasts for four days"
    )
    #: The largest growth of open handles for each request.
    handles_growth_per_request: Sourced = _chosen(0.1, "a tenth of a leak of one per request")
    #: If less than this many GiB of memory are available, the suite ends the run.
    memory_floor_gib: Sourced = _chosen(2, "with less, a machine with shared GPU memory hangs")


class TimedChats(Statement):
    """How to time chats like those of users: streamed, sampled as the model specifies, complete."""

    questions: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    #: The minimum length of an answer, in tokens. Shorter answers are not used for the rate.
    at_least: Count = 512
    #: The length at which an answer is truncated, in tokens.
    at_most: Count = 1024
    #: The minimum decode rate of the chats, as a fraction of the decode rate of the plan's longest
    #: answers. If None, there is no minimum.
    share: Annotated[float, Field(gt=0, lt=1)] | None = None


class Performance(DataTable):
    """The sizes of the timed requests, and the gates of the metrics. Lengths are in tokens."""

    prompt_tokens: Count
    generated_tokens: tuple[Count, ...] = Field(min_length=1)
    depths: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    measuring: Measuring = Measuring()
    chats: TimedChats | None = None
    gates: tuple[Gate, ...] = ()


class Regression(DataTable):
    """How much worse than in earlier runs a metric may be."""

    #: By how much a metric may be worse, as a fraction of the earlier value.
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.05
    #: Other thresholds for single metrics, which replace ``threshold``.
    metrics: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(default={})
    #: By how much rates and times of the same build vary from run to run, as a fraction. Between
    #: runs, such differences are allowed for metrics that are not in ``metrics``. With ``--ab``
    #: they are not allowed.
    runs_differ_by: Annotated[float, Field(ge=0, lt=1)] = 0.0
    #: By how much rates and times vary from start to start, as a fraction. On an H200, one start in
    #: four was 7 % slower. For a smaller difference, one run cannot show whether the build or the
    #: start is the cause.
    starts_differ_by: Annotated[float, Field(ge=0, lt=1)] = 0.08
    #: By how much the accuracy cost of rounding may be worse than in an earlier run, in the unit of
    #: the metric.
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={"price_kl": 0.0005, "price_likeliest": 2.0, "price_right_answer": 0.05}
    )
    #: Whether a higher cost of rounding is accepted if it is within ``correctness.prices``.
    price_allowed: bool = False
    source: str = Field(min_length=3, default="this project's requirement: 5 %")

    def of_price(self, metric: str) -> float:
        """Return how much worse an accuracy cost may become, in its unit.

        Args:
            metric: Its name, with or without a depth. With `price_allowed`, the result is infinite.
        """
        if self.price_allowed:
            return math.inf
        return self.prices.get(without_depth(metric), 0.0)

    def of_starts(self, metric: str, unit: str) -> float:
        """Return how much a metric may differ between two starts of one build, as a fraction.

        Args:
            metric: The metric.
            unit: The unit of the metric. If it is not that of a rate or a time, the result is 0.
        """
        is_timed = unit in ("tok/s", "ms", "µs") and metric not in self.metrics
        return self.starts_differ_by if is_timed else 0.0

    def allowed(self, metric: str) -> float:
        """Return how much worse a metric may be than in an earlier run, as a fraction.

        Args:
            metric: The name of the metric, with its depth.
        """
        return self.metrics.get(metric, max(self.threshold, self.runs_differ_by))

    def of_anchor(self, metric: str) -> float:
        """Return how much worse a level over several runs may be than the best one, as a fraction.

        Args:
            metric: The metric. Its larger tolerance in ``metrics`` allows for differences of a
                single run, such as another page cache, and does not apply to a level.
        """
        return min(self.allowed(metric), max(self.threshold, self.runs_differ_by))


class Box(DataTable):
    """Reference readings of a healthy machine of this architecture.

    If a field is None, there is no reference, and the machine is judged by the stability of its
    readings.
    """

    bandwidth_gb_s: Sourced | None = None
    matrix_tflop_s: Sourced | None = None
    #: The memory bandwidth of healthy machines. A gate uses it as long as the bandwidth was not
    #: measured.
    healthy_gb_s: Band | None = None
    #: The SM clock of a healthy GPU under load, in MHz.
    sm_clock_mhz: Sourced | None = None
    #: What to do if the clock is below half of ``sm_clock_mhz`` and no power limit explains this.
    sm_clock_remedy: str | None = None
    #: A GPU whose SM clock is at least this many MHz counts as not capped.
    sm_clock_uncapped_mhz: Sourced | None = None
    memory_available_gib: Sourced | None = None
    #: Whether a healthy machine reaches its power limit under load, as data-centre GPUs do. If
    #: false, throttling by a power cap is a defect.
    runs_at_its_power_limit: bool = True
    #: The largest spread of repeated readings: (third quartile - first quartile) / median.
    max_spread: Annotated[float, Field(gt=0)] = 0.25
    #: The largest change between the readings before and after the measurements, as a fraction.
    max_drift: Annotated[float, Field(gt=0)] = 0.25
    #: The largest share of the CPU that other processes may use.
    max_other_load: Annotated[float, Field(gt=0, le=1)] = 0.25
    #: A rate above this multiple of (bandwidth / bytes per token) is impossible.
    roofline_tolerance: Annotated[float, Field(ge=1)] = 1.15


class MatrixPlan(DataTable):
    """The plan of the matrix level."""

    #: The axes: the name of a file in ``fixtures/matrix``, or a path.
    axes: str = Field(min_length=1)
    #: The axes in the file of ``axes`` that are not varied, with the reasons. With
    #: ``--matrix-axes``, all axes are varied.
    left_out: dict[str, str] = Field(default_factory=dict)
    #: All combinations of values of this many axes are covered (2: pairwise).
    strength: Count = 2
    #: The names of the prompts in ``fixtures/answers/prompts.toml``; empty: all of them.
    prompts: tuple[str, ...] = ()
    #: The number of tokens of each answer that are compared.
    answer_tokens: Count = 24
    stress_requests: Count = 8
    #: The length of the prompt in a cell's performance sample, which has one stream, in tokens.
    prompt_tokens: Count = 128
    #: The length of the answer in a cell's performance sample, in tokens.
    generated_tokens: Count = 32
    #: The number of rounds of a cell's performance sample.
    rounds: Annotated[int, Field(ge=2)] = 6
    short_rounds: Annotated[int, Field(ge=0)] = 3
    warm_up_requests: Count = 4
    drift_bound: Annotated[float, Field(gt=0, lt=1)] = 0.05
    second_clock_bound: Annotated[float, Field(gt=0, lt=1)] = 0.05
    #: By how much a rate may be lower than the baseline's, unless the axes set another limit.
    may_be_slower: Sourced
    #: The maximum number of server starts for finding the smallest failing sets of values.
    isolation_boots: Annotated[int, Field(ge=0)] = 8

    @model_validator(mode="before")
    @classmethod
    def _without_costs(cls, data: Any) -> Any:
        return without_retired(data, "boot_s", "cell_s")


class Certify(DataTable):
    """Requirements of a certificate (``--certify``)."""

    #: No test of these levels may be skipped or deselected. Tests of other levels do not run.
    levels: tuple[Level, ...]
    #: The required result of the check of the machine.
    box: Literal["QUALIFIED", "any"] = "QUALIFIED"
    #: The fields of the kernel path that must be known.
    path: tuple[Literal["attention", "moe", "kv_layout"], ...] = ("attention", "moe")
    #: The minimum duration of the soak (``--soak``), in seconds. With 0, no soak is required.
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
    """The severities whose failures count. Failures of other severities are only listed."""

    #: The severities that count for the verdict of a run.
    verdict: tuple[Severity, ...] = (Severity.BLOCKER, Severity.CONTRACT)
    #: The severities that count if a run is compared with a trusted run (``--against``).
    against: tuple[Severity, ...] = (Severity.BLOCKER, Severity.CONTRACT)
    #: The severities that count for a certificate.
    certificate: tuple[Severity, ...] = (Severity.BLOCKER, Severity.CONTRACT)

    @field_validator("*")
    @classmethod
    def _blockers(cls, needed: tuple[Severity, ...]) -> tuple[Severity, ...]:
        if Severity.BLOCKER not in needed:
            raise ValueError(f"expected blocker among them; got {', '.join(needed) or 'none'}")
        return needed
