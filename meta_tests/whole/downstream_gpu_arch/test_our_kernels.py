"""Tests of a project that uses only the markers of the suite."""

import pytest


@pytest.mark.sm121
def test_our_kernel_is_built_for_gb10():
    import torch

    assert torch.cuda.get_device_capability() == (12, 1)


@pytest.mark.gpu
def test_our_kernel_runs():
    import torch

    assert torch.ones(2, device="cuda").sum().item() == 2


@pytest.mark.cpu
def test_our_fallback_runs():
    assert sum([1.0, 1.0]) == 2


def test_our_parser():
    assert "mxfp4".upper() == "MXFP4"
