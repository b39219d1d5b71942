"""The architectures that an expression of `-m` names."""

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
        pytest.param("not (not sm121)", ("sm121",), id="two negations"),
        pytest.param("not(not(sm121)) and not(sm90)", ("sm121",), id="without spaces"),
        pytest.param("not (cpu or not sm121) and sm90", ("sm90", "sm121"), id="negated group"),
        pytest.param(
            " and ".join(["sm121", *(f"not slow{number}" for number in range(40))]),
            ("sm121",),
            id="forty other markers",
        ),
        pytest.param(
            " or ".join([*(f"(slow{number} and fast{number})" for number in range(20)), "sm121"]),
            ("sm121",),
            id="forty other markers in groups",
        ),
        pytest.param("sm121 and device(name='not cpu (2)')", ("sm121",), id="a marker's argument"),
    ],
)
def test_architectures_asked_for_by_name(expression, names):
    assert architectures_asked_for(expression) == names
