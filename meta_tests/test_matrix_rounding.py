"""Cells of the matrix whose server rounds more than its checkpoint."""

import pytest
from test_matrix import CPU, examiner, failed

from sm121.core.configuration import ServerConfiguration
from sm121.core.unmet import Fact, Unmet
from sm121.matrix import axes, covering, examine
from sm121.matrix.axes import Space
from sm121.matrix.outcome import CellOutcome


@pytest.mark.parametrize("flags", ["sse avx512f", "amx_tile", "sse4_2 avx512fp16"])
def test_a_value_may_need_a_flag_of_the_cpu(monkeypatch, flags):
    monkeypatch.setattr(axes, "cpu_flags", lambda: flags)
    space, has = Space(CPU, "vllm", "0.32.0"), "fp16" not in flags
    assert (space.settings["kv"].keys() == {"auto", "fp8"}) == has
    assert ("AVX-512" in space.absent.get(("kv", "fp8"), "")) == (not has)
    if has:
        cells = [planned.cell for planned in covering.build(space, 1).cells]
        assert len(cells) == 4 and {cell["dtype"] for cell in cells if cell["kv"] == "fp8"} == {
            "float32"
        }


@pytest.mark.parametrize("wrong", [Unmet(Fact("rounded as kv=fp8-cut", "kv=fp8")), None])
@pytest.mark.parametrize("cell", [{"kv": "fp8"}, {"kv": "fp8", "graphs": "compiled"}, {}])
def test_a_value_may_ask_for_the_oracle(tmp_path, monkeypatch, wrong, cell):
    """What rounds is compared with the oracle that rounds so, and nothing else is."""
    monkeypatch.setattr(axes, "cpu_flags", lambda: "avx512f")

    def agrees(*_arguments):
        if wrong is not None:
            raise wrong
        return "off by 1e-5 nats"

    monkeypatch.setattr(examine.oracle, "agrees", agrees)
    made = examiner(tmp_path, lambda **_when: None)
    made.space, made._measure = Space(CPU, "vllm", "0.32.0"), failed
    planned = covering.Planned({**made.space.baseline, **cell}, ("mine",))
    found = made.examine(planned, ServerConfiguration("n", "vllm", "python", "m", "canary", (), ()))
    if cell and wrong:
        assert found.reason == f"oracle: Unmet: {wrong}" and found.outcome is CellOutcome.FAIL
    else:
        assert "oracle" not in found.reason and ("oracle" in found.path) == bool(cell)
