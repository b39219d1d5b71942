"""A trusted run detects faults of another model than gpt-oss on the real vLLM."""

import pytest

from meta_tests.faults import other_models
from meta_tests.faults.other_models import FAMILIES, GOLDEN, GROUPS, OtherModel, one_scale


@pytest.mark.slow("starts the real vLLM twice; test_init_command.py has the profile, without one")
@pytest.mark.timeout(1800)
def test_a_trusted_run_tells_the_same_model_from_a_wrong_one(tmp_path):
    model = OtherModel("qwen3", GROUPS[0], tmp_path)
    with model.serving() as server:
        model.init_profile(server)
        for _ in range(2):
            same = model.judge(server, "nothing")
            assert same.status == 0 and not same.detected_by, same
    (scaled,) = (fault for fault in model.group.faults if fault.change is one_scale)
    with model.serving(scaled) as server:
        wrong = model.judge(server, scaled.name)
    assert wrong.status == 1 and GOLDEN in wrong.detected_by, wrong


def test_the_published_table_of_other_models_has_these_faults():
    published = other_models.TABLE.read_text("utf-8")
    names = [fault.name for group in GROUPS for fault in group.faults]
    missing = [name for name in names if f"| {name} |" not in published]
    assert not missing, "run python -m meta_tests.faults.other_models"
    assert all(f" {family}: detected by |" in published for family in FAMILIES)
