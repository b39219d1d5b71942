"""The log of an Eagle3 configuration on a GB10 proves its drafter by the drafter's name."""

import pytest

from sm121.core import profile
from sm121.evidence import requirement
from sm121.evidence.kernel_path import read_log

GB10 = profile.load("sm121-gpt-oss-120b").judging(identity="0.33.0")
LOG = (
    "(EngineCore pid=7) INFO 11-29 10:00:00 [core.py:112] Initializing a V1 LLM engine (v0.33.0) "
    "with config: model='openai/gpt-oss-120b', speculative_config={}, "
    "tokenizer='openai/gpt-oss-120b', dtype=torch.bfloat16, max_seq_len=131072, "
    "enforce_eager={}, kv_cache_dtype=auto, enable_prefix_caching=True, pooler_config=None\n"
)
SPECULATES = "SpeculativeConfig(method='{}', model='{}', num_spec_tokens=3)"
NAMES = {
    "eagle3-short": "nvidia/gpt-oss-120b-Eagle3-short-context",
    "eagle3-long": "nvidia/gpt-oss-120b-Eagle3-long-context",
    "eagle3-throughput": "nvidia/gpt-oss-120b-Eagle3-throughput",
}


def wrong(configuration, speculation, folder, *, eager=False) -> str:
    """Return the contradictions that concern the configuration's drafter and its graphs."""
    log = folder / "server.log"
    log.write_text(LOG.format(speculation, eager), "utf-8")
    path = read_log(log, "vllm")
    requested = ("cuda_graphs",) if eager else ()
    required = GB10.path_of(configuration, requested)
    found = requirement.contradictions(required, path, log, configuration)
    return "\n".join(str(each) for each in found if each.part not in requirement.MUST_BE_SHOWN)


@pytest.mark.parametrize("configuration", NAMES)
@pytest.mark.parametrize("eager", [False, True])
def test_its_own_drafter_is_the_required_one(configuration, eager, tmp_path):
    served = SPECULATES.format("eagle3", NAMES[configuration])
    assert wrong(configuration, served, tmp_path, eager=eager) == ""


@pytest.mark.parametrize("configuration", NAMES)
def test_another_drafter_or_none_is_red(configuration, tmp_path):
    assert "speculative: expected eagle3, got none" in wrong(configuration, "None", tmp_path)
    ngram = SPECULATES.format("ngram", "None")
    assert "got ngram" in wrong(configuration, ngram, tmp_path)
    for other in NAMES.values():
        if other != NAMES[configuration]:
            served = SPECULATES.format("eagle3", other)
            assert "Eagle3-" in wrong(configuration, served, tmp_path)


def test_the_project_s_own_question_is_asked_without_a_drafter(tmp_path):
    served = SPECULATES.format("eagle3", NAMES["eagle3-short"])
    assert "speculative: expected none, got eagle3" in wrong("stock", served, tmp_path)
