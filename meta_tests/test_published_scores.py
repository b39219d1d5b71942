"""Published scores: lm-evaluation-harness itself asks engines by script over real HTTP."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from data_rows import from_data
from scripted_chats import scripted
from servers import executable

from sm121.answers import accuracy, published
from sm121.core import profile
from sm121.core.server import Endpoint
from sm121.core.unmet import Fact, Unmet
from sm121.core.verdict import Inconclusive, NotRun

CANARY, REAL = profile.load("cpu-tiny-gpt-oss"), profile.load("sm121-gpt-oss-120b")
(SCORE,) = CANARY.correctness.scores
DATA = Path(__file__).parents[1] / "fixtures" / "scores" / f"{SCORE.task}.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]
CAPITALS = {row["prompt"]: row["answer"] for row in ROWS}


@pytest.fixture(scope="module")
def harness(tmp_path_factory) -> Path:
    """A Python that has lm-evaluation-harness."""
    python = tmp_path_factory.mktemp("lm_eval") / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "lm_eval[api]==0.4.13"], check=True)
    return python


def capital(request: dict) -> str:
    return f"The capital is **{CAPITALS[request['messages'][-1]['content']]}**."


def of_some(share: float, effort: str = "") -> object:
    """Knows the first of the questions, and all that are asked with another effort."""
    right = [*CAPITALS][: round(share * len(CAPITALS))]

    def answer(request: dict) -> str:
        question = request["messages"][-1]["content"]
        is_right = question in right or request["reasoning_effort"] not in (effort or "high")
        return capital(request) if is_right else "Hm, I have lost my thread"

    return answer


def judged(script, python: Path, folder: Path, target=CANARY) -> str:
    remarks: list[str] = []
    with scripted(script) as endpoint:
        published.judge(target, python, endpoint, folder / "scores", remarks.append)
    return "; ".join(remarks)


@pytest.mark.slow("installs lm-evaluation-harness")
@pytest.mark.timeout(900)
def test_a_right_server_has_its_score(harness, tmp_path):
    requests: list[dict] = []
    remarks: list[str] = []
    with scripted(capital, requests=requests) as endpoint:
        published.judge(CANARY, harness, endpoint, tmp_path / "scores", remarks.append)
    assert "24 of 24 right: 100.0%" in remarks[0] and len(requests) == SCORE.questions
    assert {r["reasoning_effort"] for r in requests} == {"high"}
    assert {r["max_tokens"] for r in requests} == {SCORE.answer_tokens}
    assert {(r["temperature"], r["top_p"]) for r in requests} == {(1.0, 1.0)}
    assert not any(r.get("stop") for r in requests)
    kept = [file.name for file in (tmp_path / "scores").rglob("*") if file.is_file()]
    assert any(name.startswith("samples_") for name in kept), kept


@pytest.mark.slow("installs lm-evaluation-harness")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        (of_some(0.0), Unmet, "0 of 24 right"),
        (of_some(0.5), Unmet, "12 of 24 right"),
        (of_some(0.75, effort="high"), Inconclusive, "18 of 24 right"),
        (lambda _request: None, Unmet, "0 of 24 right"),
        (lambda _request: 1 / 0, Unmet, "None"),
    ],
    ids=["wrong at long reasoning", "half", "a few", "empty answers", "no answers"],
)
def test_a_wrong_server_has_not(harness, tmp_path, script, error, text):
    with pytest.raises(error, match=text):
        judged(script, harness, tmp_path)


@pytest.mark.slow("installs lm-evaluation-harness")
@pytest.mark.timeout(900)
def test_what_is_not_on_this_machine_is_named(harness, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    with pytest.raises(NotRun) as caught:
        judged(capital, harness, tmp_path, REAL)
    for score in (score for score in REAL.correctness.scores if score.tries is None):
        assert f"hf download --repo-type dataset {score.dataset}" in str(caught.value)


def test_a_server_that_hangs_is_not_green(tmp_path):
    """The Python that is asked waits as long as a harness does for such a server."""
    python = executable(tmp_path / "python", "exec sleep 60")
    score = SCORE.model_copy(update={"within_s": 1.0})
    correctness = CANARY.correctness.model_copy(update={"scores": (score,)})
    target = CANARY.model_copy(update={"correctness": correctness})
    with pytest.raises(Inconclusive, match="done in 1 s"):
        judged(capital, python, tmp_path, target)


def test_a_python_without_the_harness_is_named_at_once(run_pytest):
    status, run = run_pytest("tests/test_correctness.py", "--scores", sys.executable)
    assert status == 4 and "pip install 'lm_eval[api]'" in run.output, run.output


def test_a_profile_without_scores_says_so(tmp_path):
    correctness = CANARY.correctness.model_copy(update={"scores": ()})
    target = CANARY.model_copy(update={"correctness": correctness})
    with pytest.raises(NotRun, match=r"no correctness\.scores"):
        judged(capital, Path(sys.executable), tmp_path, target)


@pytest.mark.parametrize("score", REAL.correctness.scores, ids=lambda score: score.task)
def test_a_published_score_is_green_and_half_of_it_is_red(score):
    published = float(score.source.partition(" %")[0]) / 100
    shares = [accuracy.interval_of(round(share * score.questions), score.questions)
              for share in (published, published / 2)]  # fmt: skip
    shares[0].hold(score.at_least, Fact("so many"))
    with pytest.raises(Unmet):
        shares[1].hold(score.at_least, Fact("so many"))


@from_data
def test_a_score_of_fewer_questions_is_none(monkeypatch, tmp_path, task, asked, text):
    """All right, of a data set that is a part of the one that was published."""

    def run(_command, **_):
        folder = tmp_path / SCORE.task
        folder.mkdir()
        results = {task: {SCORE.metric: 1.0}}
        counts = {task: {"original": asked, "effective": asked}}
        stored = json.dumps({"results": results, "n-samples": counts})
        (folder / "results_1.json").write_text(stored)
        return SimpleNamespace(status=0, output="")

    monkeypatch.setattr(published.child, "run", run)
    endpoint = Endpoint("http://127.0.0.1:9", "key", "canary")
    context = pytest.raises(NotRun, match=text) if text else contextlib.nullcontext()
    with context:
        published.judge(CANARY, Path(sys.executable), endpoint, tmp_path, str)


@from_data
def test_an_answer_that_ends_the_harness_is_not_green(monkeypatch, tmp_path, ends, error):
    ended = SimpleNamespace(status=1, output=ends)
    monkeypatch.setattr(published.child, "run", lambda _command, **_: ended)
    endpoint = Endpoint("http://127.0.0.1:9", "key", "canary")
    with pytest.raises(error, match="lm_eval ended with status 1"):
        published.judge(CANARY, Path(sys.executable), endpoint, tmp_path, str)
