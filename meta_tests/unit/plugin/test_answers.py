"""The files of answers that the options of a run name, and the remark about a missing file."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from sm121.answers.options import AnswerOptions
from sm121.core import profile
from sm121.plugin import answers

NO_ORACLE = {"oracle": "no oracle for this architecture"}


@pytest.mark.parametrize(
    ("cannot", "against", "remarks"),
    [
        pytest.param(NO_ORACLE, "a trusted run", 1, id="no reference"),
        pytest.param({}, "a trusted run", 0, id="an oracle"),
        pytest.param(NO_ORACLE, None, 0, id="no trusted run"),
    ],
)
def test_a_run_against_another_names_the_missing_golden_file(cannot, against, remarks):
    shipped = profile.load("cpu-tiny-gpt-oss")
    correctness = shipped.correctness.model_copy(update={"cannot": cannot})
    target = SimpleNamespace(profile=shipped.model_copy(update={"correctness": correctness}))
    remark = Mock()
    run = SimpleNamespace(target=target, record=SimpleNamespace(remark=remark))
    settings = SimpleNamespace(answers=AnswerOptions(), judging=SimpleNamespace(against=against))
    config = SimpleNamespace(stash={})
    answers.refuse_wrong_files(config, SimpleNamespace(settings=settings, run=run))
    texts = [call.args[0] for call in remark.call_args_list]
    assert len(texts) == remarks and all("--golden FILE" in text for text in texts), texts
