"""A server that rounds in another way than it says is noticed, by the part that it rounds wrong."""

import shutil

import pytest
import rounding_faults
from rounding_faults import DENSE, FAULTS, HONEST, formats_of

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


@pytest.fixture(scope="module")
def few():
    """Two prompts past the window, in the numbers of their own tokens and some hundreds more."""
    patch = pytest.MonkeyPatch()
    every = dict(oracle_file.prompts())
    texts = {name: every[name] for name in oracle_file.ROUNDING_PROMPTS}
    tokens = sorted({*range(0, 100_000, 50)}.union(*texts.values()))
    prompts = [(name, [tokens.index(token) for token in ids]) for name, ids in texts.items()]
    for module in (oracle_file, log_probabilities):
        patch.setattr(module, "prompts", lambda: prompts)
    patch.setattr(oracle_file, "long_prompt", lambda: ("long", prompts[0][1][:4]))
    patch.setattr(oracle_file, "GENERATED", 1)
    patch.setattr(oracle_file, "SMALL_MISTAKES", {})
    yield tokens
    patch.undo()


@pytest.fixture(scope="module")
def checkpoints(few, canary_bf16, tmp_path_factory):
    """The canary, and the same with keys beyond 448."""
    folder = tmp_path_factory.mktemp("checkpoints")
    plain = rounding_faults.with_few_tokens(canary_bf16, folder / "canary", few)
    change = rounding_faults.with_loud_keys
    return plain, rounding_faults.write_twin(plain, folder / "loud", change)


@pytest.fixture(scope="module")
def judged(checkpoints, tmp_path_factory):
    """What the tests of the level say of a server that computes so."""
    files: dict[tuple[str, bool], OracleFile] = {}

    def judge(server: rounding_faults.Row, dtype: str) -> list[str]:
        checkpoint = checkpoints["loud" in server]
        formats = formats_of(server)
        if (key := (formats, "loud" in server)) not in files:
            files[key] = oracle_file.make(checkpoint, Rounding.parse(formats))
        file, way = files[key], None if dtype == "float32" else dtype
        tolerance = computed_tolerance(file, dtype) if dtype in file.rounded else EXACT
        if dtype == "float32" and tolerance is not EXACT:
            tolerance = log_probabilities._wider(EXACT, tolerance)
        reference = OracleReference(file, f"{dtype}, {file.rounding}", tolerance, way)
        folder = tmp_path_factory.mktemp("server") / "twin"
        asked = Asked(rounding_faults.answers(server, checkpoint, folder, dtype))
        shutil.rmtree(folder, ignore_errors=True)
        failures = []
        for test in (log_probabilities.prompts_agree, log_probabilities.roundings_are_absent):
            try:
                test(asked, reference)
            except AssertionError as error:
                failures.append(f"{test.__name__}: {error}")
            except NotRun as error:
                assert "can be told from rounding" in str(error)
        print(dict(server), dtype, failures or "green")
        return failures

    return judge


def _slow(names, quick):
    reason = "an oracle of each format"
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow(reason)) for n in names]


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("name", _slow(HONEST, ["KV cache"]))
def test_an_honest_server_is_green(judged, name, dtype):
    assert judged(HONEST[name], dtype) == []


@pytest.mark.parametrize("name", _slow(FAULTS, ["window layers alone in FP8"]))
def test_another_rounding_than_promised_is_noticed(judged, name):
    """By a test that names the format; in BF16 too where that is said to show it."""
    for dtype in ("float32", *FAULTS[name].get("also_in", ())):
        failures = judged(FAULTS[name], dtype)
        assert failures, f"survives in {dtype}"
        assert all(formats_of(FAULTS[name]) in failure for failure in failures)


def test_the_twin_of_the_canary_holds_what_the_rule_makes(checkpoints, tmp_path):
    """Once more is the same, and nothing but dense layers differs."""
    from safetensors.torch import load_file

    change = rounding_faults.held({"formats": "dense"})
    twin = rounding_faults.write_twin(checkpoints[0], tmp_path / "twin", change)
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoints[0], twin))
    way = Rounding.parse(DENSE)
    for name, tensor in before.items():
        part = rounding_faults.part_of(name) if name.endswith(".weight") else None
        near = rounding_faults.rounding.weight(way, part) if part else lambda values: values
        assert torch.equal(near(tensor.float()).bfloat16(), after[name]), name
