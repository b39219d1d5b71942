"""Scores that others publish: tasks of lm-evaluation-harness, whose data sets are on this machine.
Source: https://github.com/EleutherAI/lm-evaluation-harness, docs/interface.md and API_guide.md."""

import json
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

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

#: Questions at once: a GB10 serves four in little more than the time of one.
_AT_ONCE = 4
#: Nothing is downloaded, and the server is reached without a proxy. Progress bars would fill what
#: is kept of the output, before the harness says why it ended.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "no_proxy": "*", "TQDM_DISABLE": "1",
}  # fmt: skip
#: What the harness prints of a server that does not answer, and of a data set that is not there.
_SERVER = ("API request failed", "aiohttp.client_exceptions")
_DATA = ("OfflineModeIsEnabled", "on the Hub")


def refuse_without_harness(python: Path) -> None:
    """Raises UsageError: the Python has no lm_eval, or is none."""
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


def judge(
    profile: Profile,
    python: Path,
    endpoint: Endpoint,
    folder: Path,
    remark: Callable[[str], object],
) -> None:
    """Each score of the profile, by its 95 % interval. `python`: has lm_eval; `folder`: for its
    files. Raises Unmet: a score is too low, or the server does not answer; Inconclusive: what is
    required lies in an interval; NotRun: the profile has no score, or one cannot be had here."""
    if not (scores := [score for score in profile.correctness.scores if score.tries is None]):
        raise NotRun(f"profile {profile.name} has no correctness.scores: name tasks of lm_eval")

    def is_reached(score: Score) -> None:
        about = f"{score.task}, effort {score.effort}"
        try:
            share = _measured(score, python, endpoint, folder)
        except NotRun as error:
            raise NotRun(f"{about}: {error}") from error
        except (child.TookTooLong, Inconclusive) as error:  # a server that hangs, or is slow
            fact = Fact(f"done in {score.within_s:.0f} s", f"{error}", about)
            raise Inconclusive(fact) from error
        remark(f"{about}: {share or 'no answers'}; {score.source}")
        fact = Fact(f"at least {score.at_least:.1%}", f"{share}", about, evidence=f"{folder}")
        if share is None:
            raise Unmet(fact)
        share.hold(score.at_least, fact)

    require_each(is_reached, scores)


def _measured(score: Score, python: Path, endpoint: Endpoint, folder: Path) -> Interval | None:
    """The share of right answers; None: the server ended the run. Raises NotRun: something is
    missing here; TookTooLong."""
    log, tasks = folder / f"{score.task}.log", Path(f"{files('sm121.fixtures') / 'scores'}")
    # As OpenAI samples; no stop words of a task, since reasoning may hold them.
    sampling: dict[str, object] = {
        "reasoning_effort": score.effort, "max_gen_toks": score.answer_tokens, "do_sample": True,
        "temperature": 1.0, "top_p": 1.0, "until": [],
    }  # fmt: skip
    command: list[str | Path] = [
        python, "-m", "lm_eval", "--model", "local-chat-completions",
        "--model_args", f"model={endpoint.served_name},num_concurrent={_AT_ONCE},max_retries=2,"
        f"timeout={score.within_s:.0f},base_url={endpoint.base_url}/v1/chat/completions",
        "--tasks", score.task, "--include_path", tasks, "--limit", f"{score.questions}",
        "--apply_chat_template", "--log_samples", "--output_path", folder / score.task,
        "--gen_kwargs", json.dumps(sampling),
    ]  # fmt: skip
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
        results = json.loads(results_files[-1].read_text("utf-8"))
        if score.task not in results["results"]:
            raise NotRun(f"expected the task {score.task}, lm_eval gives {[*results['results']]}")
        values, total = results["results"][score.task], results["n-samples"][score.task]
        if score.metric not in values:
            raise NotRun(f"expected the metric {score.metric}, lm_eval gives {[*values]}")
        if (count := total["effective"]) < score.questions:
            raise NotRun(f"expected {score.questions} questions, lm_eval asked {count}")
        right = round(values[score.metric] * total["effective"])
        return accuracy.interval_of(right, total["effective"])
    if any(words in ended.output for words in _SERVER):
        return None
    if any(words in ended.output for words in _DATA):
        where = f"hf download --repo-type dataset {score.dataset}"
        raise NotRun(f"its data set is not on this machine: {where}")
    lacks = "ModuleNotFoundError" in ended.output  # else an answer may have ended it
    raise (NotRun if lacks else Inconclusive)(f"lm_eval ended with status {ended.status}: {log}")
