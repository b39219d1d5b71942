"""A server that rounds in another way than it says is noticed, by the part that it rounds wrong."""

import pytest
import rounding_faults
from rounding_faults import DENSE, FAULTS, HONEST, Fault

torch = pytest.importorskip("torch")

from test_oracle_file import Asked  # noqa: E402

from sm121.answers import log_probabilities, oracle_file  # noqa: E402
from sm121.answers.log_probabilities import OracleReference, computed_tolerance  # noqa: E402
from sm121.answers.oracle_file import OracleFile  # noqa: E402
from sm121.core.level_settings import LogProbabilityTolerance  # noqa: E402
from sm121.core.verdict import NotRun  # noqa: E402
from sm121.oracles.formats import Rounding  # noqa: E402

#: The profile's of float32 (fixtures/profiles/cpu-tiny-gpt-oss.toml).
EXACT = LogProbabilityTolerance(max_abs=1e-3, mean_abs=1e-4, source="the profile")
#: Roundings that BF16 hides on so few tokens.
HIDDEN = {
    "the floor rule for o": "rounds as BF16 does, and in one layer of two products",
}


@pytest.fixture(scope="module")
def few():
    """Two prompts past the window, and nothing that is about no rounding."""
    patch = pytest.MonkeyPatch()
    every = dict(oracle_file.prompts())
    prompts = [(name, every[name][:180]) for name in oracle_file.ROUNDING_PROMPTS]
    for module in (oracle_file, log_probabilities):
        patch.setattr(module, "prompts", lambda: prompts)
    patch.setattr(oracle_file, "long_prompt", lambda: ("long", every["tool call"][:4]))
    patch.setattr(oracle_file, "GENERATED", 1)
    patch.setattr(oracle_file, "SMALL_MISTAKES", {})
    yield prompts
    patch.undo()


@pytest.fixture(scope="module")
def loud(canary_bf16, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loud") / "keys"
    return rounding_faults.write_twin(canary_bf16, folder, rounding_faults.loud)


@pytest.fixture(scope="module")
def judged(few, canary_bf16, loud):
    """What the tests of the level say of a server that computes so."""
    files: dict[tuple[str, bool], OracleFile] = {}

    def judge(server: Fault, dtype: str) -> list[str]:
        checkpoint, key = loud if server.is_loud else canary_bf16, (server.formats, server.is_loud)
        if key not in files:
            files[key] = oracle_file.make(checkpoint, Rounding.parse(server.formats))
        file, way = files[key], None if dtype == "float32" else dtype
        tolerance = computed_tolerance(file, dtype) if dtype in file.rounded else EXACT
        if dtype == "float32" and tolerance is not EXACT:
            tolerance = log_probabilities._wider(EXACT, tolerance)
        reference = OracleReference(file, f"{dtype}, {file.rounding}", tolerance, way)
        asked = Asked(rounding_faults.answers(server, checkpoint, dtype, few))
        failures = []
        for test in (log_probabilities.prompts_agree, log_probabilities.roundings_are_absent):
            try:
                test(asked, reference)
            except AssertionError as error:
                failures.append(f"{test.__name__}: {error}")
            except NotRun as error:
                assert "can be told from rounding" in str(error)
        print(server.formats, dtype, failures or "green")
        return failures

    return judge


def _slow(names, quick):
    reason = "an oracle of each format: minutes on a busy machine"
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow(reason)) for n in names]


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("name", _slow(HONEST, ["KV cache"]))
def test_an_honest_server_is_green(judged, name, dtype):
    assert judged(HONEST[name], dtype) == []


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("name", _slow(FAULTS, ["window layers alone in FP8"]))
def test_another_rounding_than_promised_is_noticed(judged, name, dtype):
    """By a test that names the format; in BF16 where BF16 itself moves the answers less."""
    failures = judged(FAULTS[name], dtype)
    if dtype == "bf16" and name in HIDDEN:
        return
    assert failures, "survives"
    assert all(FAULTS[name].formats in failure for failure in failures)


def test_the_twin_of_the_canary_holds_what_the_rule_makes(canary_bf16, tmp_path):
    """Once more is the same, and nothing but dense layers differs."""
    from safetensors.torch import load_file

    twin = rounding_faults.write_twin(canary_bf16, tmp_path / "twin")
    before, after = (load_file(folder / "model.safetensors") for folder in (canary_bf16, twin))
    way = Rounding.parse(DENSE)
    for name, tensor in before.items():
        part = rounding_faults.part_of(name)
        near = rounding_faults.rounding.weight(way, part) if part else lambda values: values
        assert torch.equal(near(tensor.float()).bfloat16(), after[name]), name
