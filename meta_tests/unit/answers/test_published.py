"""Published scores: lm-evaluation-harness sends requests to scripted engines over real HTTP."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from meta_tests.fakes.scripted_chats import scripted
from meta_tests.fakes.servers import executable
from meta_tests.folders import ROOT
from sm121.answers import accuracy, published
from sm121.core import profile
from sm121.core.server import Endpoint
from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import Inconclusive, NotRun

CANARY = profile.load("cpu-tiny-gpt-oss")
REAL = profile.load("sm121-gpt-oss-120b")
(SCORE,) = CANARY.correctness.scores
DATA = ROOT / "fixtures" / "scores" / f"{SCORE.task}.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]
CAPITALS = {row["prompt"]: row["answer"] for row in ROWS}


@pytest.fixture(scope="module")
def harness(tmp_path_factory) -> Path:
    """A Python interpreter with lm-evaluation-harness."""
    python = tmp_path_factory.mktemp("lm_eval") / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "lm_eval[api]==0.4.13"], check=True)
    return python


def capital(request: dict) -> str:
    return f"The capital is **{CAPITALS[request['messages'][-1]['content']]}**."


def of_some(share: float, effort: str = "") -> object:
    """A server that knows the first of the questions, and all questions at another reasoning
    effort."""
    right = [*CAPITALS][: round(share * len(CAPITALS))]

    def answer(request: dict) -> str:
        question = request["messages"][-1]["content"]
        is_right = question in right or request["reasoning_effort"] not in (effort or "high")
        return capital(request) if is_right else "Hm, I have lost my thread"

    return answer


def judged(script, python: Path, folder: Path, target=CANARY, requests=None) -> str:
    remarks: list[str] = []
    with scripted(script, requests=requests) as endpoint:
        published.judge_scores(target, python, endpoint, folder / "scores", remarks.append)
    return "; ".join(remarks)


def scored_by(*scores):
    """Return the canary's profile with other published scores."""
    correctness = CANARY.correctness.model_copy(update={"scores": scores})
    return CANARY.model_copy(update={"correctness": correctness})


@pytest.mark.slow("installs lm-evaluation-harness")
@pytest.mark.timeout(900)
def test_a_right_server_has_its_score(harness, tmp_path):
    requests: list[dict] = []
    assert "24 of 24 right: 100.0%" in judged(capital, harness, tmp_path, requests=requests)
    assert len(requests) == SCORE.questions and not any(r.get("stop") for r in requests)
    keys = ("reasoning_effort", "max_tokens", "temperature", "top_p")
    sent = set()
    for r in requests:
        sent.add(tuple(r[key] for key in keys))
    assert sent == {("high", SCORE.answer_tokens, 1.0, 1.0)}
    names = [file.name for file in (tmp_path / "scores").rglob("*") if file.is_file()]
    assert any(name.startswith("samples_") for name in names), names


@pytest.mark.slow("installs lm-evaluation-harness")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        pytest.param(of_some(0.0), Unmet, "0 of 24 right", id="wrong at long reasoning"),
        pytest.param(of_some(0.5), Unmet, "12 of 24 right", id="half"),
        pytest.param(of_some(0.75, effort="high"), Inconclusive, "18 of 24 right", id="a few"),
        pytest.param(Mock(return_value=None), Unmet, "0 of 24 right", id="empty answers"),
        pytest.param(Mock(side_effect=ZeroDivisionError), Unmet, "None", id="no answers"),
    ],
)
def test_a_wrong_server_fails_its_score(harness, tmp_path, script, error, text):
    with pytest.raises(error, match=text):
        judged(script, harness, tmp_path)


@pytest.mark.slow("installs lm-evaluation-harness")
@pytest.mark.timeout(900)
def test_missing_data_sets_are_named(harness, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    with pytest.raises(NotRun) as caught:
        judged(capital, harness, tmp_path, REAL)
    for score in (score for score in REAL.correctness.scores if score.tries is None):
        assert f"hf download --repo-type dataset {score.dataset}" in str(caught.value)


def test_a_server_that_hangs_is_not_green(tmp_path):
    python = executable(tmp_path / "python", "exec sleep 60")
    target = scored_by(SCORE.model_copy(update={"within_s": 1.0}))
    with pytest.raises(Inconclusive, match="an end within 1 s"):
        judged(capital, python, tmp_path, target)


def test_a_python_without_the_harness_is_named_at_once(run_pytest):
    status, run = run_pytest("tests/test_correctness.py", "--scores", sys.executable)
    assert status == 4 and "pip install 'lm_eval[api]'" in run.output, run.output


def test_a_profile_without_scores_says_so(tmp_path):
    with pytest.raises(NotRun, match=r"no correctness\.scores"):
        judged(capital, Path(sys.executable), tmp_path, scored_by())


@pytest.mark.parametrize("score", REAL.correctness.scores, ids=lambda score: score.task)
def test_a_published_score_is_green_and_half_of_it_is_red(score):
    whole = float(score.source.partition(" %")[0]) / 100
    for share, expected in ((whole, nullcontext()), (whole / 2, pytest.raises(Unmet))):
        right = accuracy.interval_of(round(share * score.questions), score.questions)
        with expected:
            right.hold(score.at_least, Fact("so many"))


ENDPOINT = Endpoint("http://127.0.0.1:9", "key", "canary")


@pytest.mark.parametrize(
    ("task", "asked", "text"),
    [
        pytest.param(SCORE.task, 24, None, id="SCORE.task, 24"),
        pytest.param(
            SCORE.task,
            23,
            "expected 24 questions, got 23",
            id="SCORE.task, 23, expected 24 questions, got 23",
        ),
        pytest.param(
            SCORE.task,
            6,
            "expected 24 questions, got 6",
            id="SCORE.task, 6, expected 24 questions, got 6",
        ),
        pytest.param(
            SCORE.task,
            0,
            "expected 24 questions, got 0",
            id="SCORE.task, 0, expected 24 questions, got 0",
        ),
        pytest.param(
            "another",
            24,
            "expected the task canary_capitals, got .'another'",
            id="another, 24, expected the task canary_capitals, lm_eval",
        ),
    ],
)
def test_a_score_of_fewer_questions_is_none(monkeypatch, tmp_path, task, asked, text):
    """If the data set is only a part of the published one, there is no score.

    All answers are right."""

    def run(_command, **_):
        folder = tmp_path / SCORE.task
        folder.mkdir()
        counts = {task: {"original": asked, "effective": asked}}
        stored = {"results": {task: {SCORE.metric: 1.0}}, "n-samples": counts}
        (folder / "results_1.json").write_text(json.dumps(stored))
        return SimpleNamespace(status=0, output="")

    monkeypatch.setattr(published.child, "run", run)
    with pytest.raises(NotRun, match=text) if text else nullcontext():
        published.judge_scores(CANARY, Path(sys.executable), ENDPOINT, tmp_path, str)


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        pytest.param(
            "TypeError: expected string or bytes-like object, got 'list'",
            Inconclusive,
            id="TypeError: expected string or bytes-like object, got",
        ),
        pytest.param(
            "AttributeError: 'int' object has no attribute 'strip'",
            Inconclusive,
            id="AttributeError: 'int' object has no attribute 'strip'",
        ),
        pytest.param("KeyError: 'message'", Inconclusive, id="KeyError: 'message', Inconclusive"),
        pytest.param(
            "ModuleNotFoundError: No module named 'langdetect'",
            NotRun,
            id="ModuleNotFoundError: No module named 'langdetect'",
        ),
    ],
)
def test_an_answer_that_ends_the_harness_is_not_green(monkeypatch, tmp_path, ends, error):
    ended = SimpleNamespace(status=1, output=ends)
    monkeypatch.setattr(published.child, "run", lambda _command, **_: ended)
    with pytest.raises(error, match="lm_eval ended with status 1"):
        published.judge_scores(CANARY, Path(sys.executable), ENDPOINT, tmp_path, str)
