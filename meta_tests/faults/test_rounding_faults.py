"""A server that rounds in another way than it reports is detected, and the message names the
part."""

import re
import shutil

import pytest

from meta_tests.fakes.run_events import stand_in
from meta_tests.faults import rounding_faults
from meta_tests.faults.rounding_faults import FAULTS, HONEST, formats_of

torch = pytest.importorskip("torch")

from meta_tests.unit.answers.test_oracle_file import Asked  # noqa: E402
from sm121.answers import log_probabilities, oracle_making, oracle_tolerance  # noqa: E402
from sm121.answers.oracle_file import OracleFile  # noqa: E402
from sm121.core.server import Endpoint, Server  # noqa: E402
from sm121.core.unmet import Unmet  # noqa: E402
from sm121.core.verdict import NotRun  # noqa: E402
from sm121.evidence.kernel_path import KernelPath  # noqa: E402
from sm121.evidence.log_start import LogStart  # noqa: E402
from sm121.matrix import oracle  # noqa: E402
from sm121.oracles.formats import Rounding  # noqa: E402
from tools import roundings  # noqa: E402


@pytest.fixture(scope="module")
def few():
    """Return two prompts longer than the window, in a small vocabulary of their tokens and some
    hundreds more."""
    with roundings.two_prompts() as tokens:
        yield tokens


@pytest.fixture(scope="module")
def checkpoints(few, canary_bf16, tmp_path_factory):
    """Return the canary, and the canary with keys larger than 448."""
    folder = tmp_path_factory.mktemp("checkpoints")
    plain = roundings.with_few_tokens(canary_bf16, folder / "canary", few)
    change = rounding_faults.with_loud_keys
    return plain, roundings.write_twin(plain, folder / "loud", change)


@pytest.fixture(scope="module")
def judged(checkpoints, tmp_path_factory):
    """Return the results of the level's tests on a server that computes with this fault."""
    files: dict[tuple[str, bool], OracleFile] = {}

    def judge(server: rounding_faults.Row, dtype: str) -> list[str]:
        checkpoint = checkpoints["loud" in server]
        formats = formats_of(server)
        if (key := (formats, "loud" in server)) not in files:
            files[key] = oracle_making.make(checkpoint, Rounding.parse(formats))
        reference = roundings.reference(files[key], dtype)
        folder = tmp_path_factory.mktemp("server") / "twin"
        asker = Asked(rounding_faults.answers(server, checkpoint, folder, dtype))
        shutil.rmtree(folder, ignore_errors=True)
        failures = []
        for test in (log_probabilities.prompts_agree, log_probabilities.roundings_are_absent):
            try:
                test(asker, reference)
            except AssertionError as error:
                failures.append(f"{test.__name__}: {error}")
            except NotRun as error:
                assert "can be distinguished from rounding" in str(error)
        print(dict(server), dtype, failures or "green")
        return failures

    return judge


@pytest.mark.parametrize("cached", ["cut off", "nothing"])
def test_a_cell_of_the_matrix_is_held_against_the_oracle(
    checkpoints, monkeypatch, cached, tmp_path
):
    """In a cell that is compared with the oracle, a server that truncates instead of rounding
    passes, because vLLM on a CPU truncates.

    A server without FP8 fails."""
    server = Server(Endpoint("http://127.0.0.1:1", "", "m"), True, "vllm", None, None, None, None)
    row = {"formats": "kv=fp8", "cached": cached}
    answers = rounding_faults.answers(row, checkpoints[0], tmp_path / "twin", "exact")
    path = KernelPath(
        log=LogStart(version="0.32.0"), attention="CPU_ATTN", moe="CPU", kv_cache_dtype="fp8"
    )
    run = stand_in(profile=roundings.PROFILE, of=lambda _server: path)
    monkeypatch.setattr(oracle_tolerance, "checkpoint_of", lambda _server: checkpoints[0])
    monkeypatch.setattr(oracle, "Asker", lambda _server: Asked(answers))
    if cached == "cut off":
        assert oracle.agrees(run, server, tmp_path).startswith("kv=fp8-cut; 2 other roundings")
    else:
        with pytest.raises(Unmet, match=r"rounding as kv=fp8-cut.* kv=checkpoint"):
            oracle.agrees(run, server, tmp_path)


def _slow(names, quick):
    reason = "an oracle of each format"
    parameters = []
    for n in names:
        if n in quick:
            parameters.append(n)
        else:
            parameters.append(pytest.param(n, marks=pytest.mark.slow(reason)))
    return parameters


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("name", _slow(HONEST, ["KV cache"]))
def test_an_honest_server_is_green(judged, name, dtype):
    assert judged(HONEST[name], dtype) == []


@pytest.mark.parametrize("name", _slow(FAULTS, ["window layers alone in FP8"]))
def test_another_rounding_than_promised_is_noticed(judged, name):
    """If a server rounds in another format than it reports, a test fails and names the format.

    The first part that it names is the one whose rounding differs.

    If the row says so, this also holds in BF16."""
    for dtype in ("float32", *FAULTS[name].get("also_in", ())):
        failures = judged(FAULTS[name], dtype)
        assert failures, f"survives in {dtype}"
        for failure in failures:
            assert formats_of(FAULTS[name]) in failure
        if dtype == "float32" and "names" in FAULTS[name]:
            assert re.search(r"got \S+ (\S+)", failures[-1])[1].startswith(FAULTS[name]["names"])


def test_the_twin_of_the_canary_holds_what_the_rule_makes(checkpoints, tmp_path):
    """The codec and the oracle's rounding give the same values, and only dense layers of the
    checkpoint differ."""
    from safetensors.torch import load_file

    change = rounding_faults.held({"formats": "dense"})
    by_codec = roundings.write_twin(checkpoints[0], tmp_path / "codec", change)
    folders = (checkpoints[0], by_codec, roundings.dense_twin(checkpoints[0], tmp_path / "twin"))
    before, codec, twin = (load_file(folder / "model.safetensors") for folder in folders)
    for name, tensor in before.items():
        is_dense = name.endswith(".weight") and roundings.part_of(name) is not None
        assert torch.equal(codec[name], twin[name]), name
        assert torch.equal(tensor, twin[name]) != is_dense, name
