"""The architecture of a machine is detected with torch or NVML."""

import pytest

from pytest_gpu_arch import detection


@pytest.mark.parametrize(
    ("capability", "nvml", "name", "evidence"),
    [
        pytest.param((12, 1), None, "sm121", None, id="12 1, sm121"),
        pytest.param((12, 0), None, "sm120", None, id="12 0, sm120"),
        pytest.param((9, 0), None, "sm90", None, id="9 0, sm90"),
        pytest.param(None, (12, 1), "sm121", "NVML", id="12 1, sm121, NVML"),
        pytest.param((99, 9), None, None, None, id="99 9"),
    ],
)
def test_detection_by_capability(monkeypatch, capability, nvml, name, evidence):
    """torch detects the capability, or else NVML does.

    A GPU without a name is not taken for a CPU.
    """
    monkeypatch.setattr(detection, "_torch_capability", lambda: (capability, "torch: meta"))
    if nvml is not None:
        monkeypatch.setattr(detection, "_nvml_capability", lambda: (nvml, "NVML: meta"))
    detected = detection.detect()
    assert detected.name == name and (evidence or "") in detected.evidence


def test_detection_of_this_machine_names_its_sources():
    detected = detection.detect()
    assert detected.name == "cpu" and "torch" in detected.evidence and "NVML" in detected.evidence
