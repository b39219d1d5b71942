"""The names of architectures, and for which of them a test is."""

import pytest

from pytest_gpu_arch import names


@pytest.mark.parametrize(
    ("markers", "arch", "expected"),
    [
        pytest.param({"sm121"}, "sm121", True, id="its own"),
        pytest.param({"sm121"}, "sm120", False, id="its neighbour"),
        pytest.param({"sm121"}, "cpu", False, id="gpu on a cpu"),
        pytest.param({"cpu"}, "sm121", False, id="cpu on a gpu"),
        pytest.param({"cpu", "sm121"}, "cpu", True, id="one of two"),
        pytest.param({"gpu"}, "sm90", True, id="any gpu"),
        pytest.param({"gpu"}, "cpu", False, id="any gpu on a cpu"),
        pytest.param({"gpu"}, None, True, id="any gpu on one without a name"),
        pytest.param({"sm121"}, None, False, id="a name on one without a name"),
        pytest.param({"cpu"}, None, False, id="cpu on one without a name"),
        pytest.param({"gpu", "sm121"}, "sm90", False, id="a name narrows gpu"),
        pytest.param({"gpu", "cpu"}, "sm90", True, id="cpu does not narrow gpu"),
    ],
)
def test_markers_allow_an_architecture(markers, arch, expected):
    assert names.has(frozenset(markers), arch) is expected


@pytest.mark.parametrize(
    ("markers", "text"),
    [
        pytest.param({"sm121", "cpu", "sm90"}, "cpu or sm90 or sm121", id="in their order"),
        pytest.param({"gpu"}, "a GPU", id="any gpu"),
        pytest.param({"gpu", "sm120"}, "sm120", id="a name narrows gpu"),
    ],
)
def test_markers_in_words(markers, text):
    assert names.listed(markers) == text


def test_a_chip_name_is_accepted_and_other_words_are_refused():
    assert names.parse("GB10") == "sm121"
    with pytest.raises(ValueError, match="--arch SM121: expected one of cpu, sm80"):
        names.parse("SM121")
