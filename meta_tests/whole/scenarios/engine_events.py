"""Tests that pass although something happens to the server between them.

The catalogue of false-green scenarios starts them with ``scripted_engine.py``. SM121_META_DO is the
query of ``GET /meta``."""

import os
import time

import pytest

pytestmark = [pytest.mark.applies_to("cpu", "gpu")]


@pytest.mark.smoke
def test_serves_and_is_told(http):
    assert http.get("/health").status_code == 200
    if do := os.environ.get("SM121_META_DO"):
        http.get(f"/meta?{do}&after=1")


@pytest.mark.kernel
def test_asks_no_server():
    time.sleep(1.6)


@pytest.mark.correctness
def test_asks_the_server_again(http):
    assert http.get("/health").status_code == 200
