"""Compare a model's scores in lm-evaluation-harness with its published scores.

The data sets must be on this machine. Source: https://github.com/EleutherAI/lm-evaluation-harness,
docs/interface.md and API_guide.md.
"""

import json
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from sm121.answers import accuracy
from sm121.answers.accuracy import Interval
from sm121.compilation import child
from sm121.core.errors import UsageError
from sm121.core.files import write_text
from sm121.core.level_settings import Score
from sm121.core.profile import Profile
from sm121.core.server import Endpoint
from sm121.core.unmet import Fact, Unmet, require_each
from sm121.core.verdict import Inconclusive, NotRun

#: The number of concurrent questions. A GB10 answers four in little more time than one.
_CONCURRENCY = 4
#: Environment variables of the harness. They prevent downloads, the use of a proxy, and progress
#: bars, which would push an error message out of the truncated output.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "no_proxy": "*",
    "TQDM_DISABLE": "1",
}
#: Texts in the output of the harness if the server does not answer.
_NO_SERVER = ("API request failed", "aiohttp.client_exceptions")
#: Texts in the output of the harness if a data set is not on this machine.
_NO_DATA = ("OfflineModeIsEnabled", "on the Hub")


def refuse_without_harness(python: Path) -> None:
    """Reject a Python interpreter without lm-evaluation-harness.

    Args:
        python: The path of the interpreter.

    Raises:
        UsageError: The path is not a Python interpreter, or lm_eval is not installed in it.
    """
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('lm_eval') is None)"
    try:
        status = child.run([python, "-c", code], timeout_s=60.0).status
    except (OSError, child.TookTooLong) as error:
        raise UsageError(f"--scores {python}: expected a Python: {error}") from error
    if status != 0:
        raise UsageError(
            f"--scores {python}: expected a Python with lm-evaluation-harness: pip install "
            "'lm_eval[api]'"
        )


def judge_scores(
    profile: Profile,
    python: Path,
    endpoint: Endpoint,
    folder: Path,
    remark: Callable[[str], object],
) -> None:
    """Judge each score of the profile by its 95 % interval.

    Args:
        profile: ``correctness.scores`` has the tasks and their bounds.
        python: A Python with lm_eval.
        endpoint: The server.
        folder: The folder for the files of the harness.
        remark: Called with a text with the figures of each score.

    Raises:
        Unmet: A score is too low, or the server does not answer.
        Inconclusive: A bound is inside the interval, or the harness exceeded its time limit.
        NotRun: The profile has no score, or a score cannot be measured here.
    """
    scores = [score for score in profile.correctness.scores if score.tries is None]
    if not scores:
        raise NotRun(f"profile {profile.name} has no correctness.scores: name tasks of lm_eval")

    def is_reached(score: Score) -> None:
        about = f"{score.task}, effort {score.effort}"
        try:
            share = _measure(score, python, endpoint, folder)
        except NotRun as error:
            raise NotRun(f"{about}: {error}") from error
        except (child.TookTooLong, Inconclusive) as error:  # the server hangs or is slow
            fact = Fact(f"an end within {score.within_s:.0f} s", f"{error}", about)
            raise Inconclusive(fact) from error
        remark(f"{about}: {share or 'no answers'}; {score.source}")
        fact = Fact(f"at least {score.at_least:.1%}", f"{share}", about, evidence=f"{folder}")
        if share is None:
            raise Unmet(fact)
        share.hold(score.at_least, fact)

    require_each(is_reached, scores)


def _measure(score: Score, python: Path, endpoint: Endpoint, folder: Path) -> Interval | None:
    """Return the fraction of correct answers; None if the server did not answer.

    Raises NotRun if a package or data set is missing on this machine, and TookTooLong after the
    time limit.
    """
    log = folder / f"{score.task}.log"
    tasks = Path(f"{files('sm121.fixtures') / 'scores'}")
    command = _command(score, python, endpoint, tasks, folder / score.task)
    environment = os.environ | _ENVIRONMENT | {"OPENAI_API_KEY": endpoint.api_key}
    folder.mkdir(exist_ok=True)
    try:
        ended = child.run(command, timeout_s=score.within_s, environment=environment, folder=tasks)
    except OSError as error:
        raise NotRun(f"{python}: {error}") from error
    output = ended.output
    if endpoint.asks_for_a_key:
        output = output.replace(endpoint.api_key, "[redacted]")
    write_text(output, log)
    results_files = sorted((folder / score.task).rglob("results_*.json"))
    if ended.status == 0 and results_files:
        return _share(score, json.loads(results_files[-1].read_text("utf-8")))
    if any(words in ended.output for words in _NO_SERVER):
        return None
    if any(words in ended.output for words in _NO_DATA):
        where = f"hf download --repo-type dataset {score.dataset}"
        raise NotRun(f"its data set is not on this machine: {where}")
    text = f"lm_eval ended with status {ended.status}: {log}"
    if "ModuleNotFoundError" in ended.output:
        raise NotRun(text)
    raise Inconclusive(text)  # an unexpected answer may have crashed the harness


def _command(
    score: Score, python: Path, endpoint: Endpoint, tasks: Path, output: Path
) -> list[str | Path]:
    """Return the command line of the harness."""
    model = (
        f"model={endpoint.served_name},num_concurrent={_CONCURRENCY},max_retries=2,"
        f"timeout={score.within_s:.0f},base_url={endpoint.base_url}/v1/chat/completions"
    )
    # Use OpenAI's sampling parameters, and no stop words of the task, because reasoning may contain
    # them.
    sampling: dict[str, object] = {
        "reasoning_effort": score.effort,
        "max_gen_toks": score.answer_tokens,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "until": [],
    }
    command: list[str | Path] = [python, "-m", "lm_eval"]
    command += ["--model", "local-chat-completions", "--model_args", model]
    command += ["--tasks", score.task, "--include_path", tasks, "--limit", f"{score.questions}"]
    command += ["--apply_chat_template", "--log_samples", "--output_path", output]
    command += ["--gen_kwargs", json.dumps(sampling)]
    return command


def _share(score: Score, results: dict[str, Any]) -> Interval:
    """Return the fraction of correct answers in the results of the harness."""
    if score.task not in results["results"]:
        raise NotRun(f"expected the task {score.task}, got {[*results['results']]}")
    values = results["results"][score.task]
    if score.metric not in values:
        raise NotRun(f"expected the metric {score.metric}, got {[*values]}")
    count = results["n-samples"][score.task]["effective"]
    if count < score.questions:
        raise NotRun(f"expected {score.questions} questions, got {count}")
    return accuracy.interval_of(round(values[score.metric] * count), count)
