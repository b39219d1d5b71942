"""Checks that the entry of a known vLLM bug names; unit/engines/test_capabilities.py starts
them."""

import pytest

pytestmark = [pytest.mark.correctness, pytest.mark.applies_to("cpu", "gpu")]


def test_answers_in_a_form_are_right(capabilities):
    raise AssertionError(
        f"expected 200 of {capabilities.engine}, got 500\n"
        "Unexpected token 200002 while expecting start token 200006"
    )


def test_no_harmony_error_in_the_log():
    raise AssertionError("expected no HarmonyError, got something else")


def test_a_tool_can_be_required():
    pass
