"""The architectures in an expression of `-m`."""

import pytest

from pytest_gpu_arch.expression import architectures_asked_for


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        pytest.param("sm121", ("sm121",), id="sm121, sm121"),
        pytest.param("sm121 and smoke", ("sm121",), id="sm121 and smoke, sm121"),
        pytest.param("smoke or sm121", ("sm121",), id="smoke or sm121, sm121"),
        pytest.param("sm90 or sm121", ("sm90", "sm121"), id="sm90 or sm121, sm90 sm121"),
        pytest.param("not sm121", (), id="not sm121"),
        pytest.param("smoke and not sm121", (), id="smoke and not sm121"),
        pytest.param("gpu", (), id="gpu"),
        pytest.param("smoke", (), id="smoke"),
        pytest.param("", (), id="nothing"),
        pytest.param("cpu", ("cpu",), id="cpu, cpu"),
        pytest.param(
            "sm121 and smoke and not kernel", ("sm121",), id="sm121 and smoke and not kernel, sm121"
        ),
        pytest.param(
            "(sm121 or slow) and not cpu", ("sm121",), id="(sm121 or slow) and not cpu, sm121"
        ),
    ],
)
def test_architectures_asked_for_by_name(expression, names):
    assert architectures_asked_for(expression) == names
