"""Mistakes in a test of another project are refused at once."""

import pytest

from sm121.measure.measurement import Measurement


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"unit": "tokens/s"}, "tg32: unit: expected one of tok/s, ms, .*, got 'tokens/s'"),
        ({"samples": [52.0, "53"]}, "tg32: samples: expected numbers, got '53'"),
        ({"quantile": 99}, "tg32: quantile: expected 0 to 1, got 99"),
    ],
    ids=["unit", "sample", "quantile"],
)
def test_an_invalid_measurement_is_refused(wrong, message):
    fields = {"name": "tg32", "unit": "tok/s", "samples": [52.0], "higher_is_better": True}
    Measurement(**fields)
    with pytest.raises(ValueError, match=message):
        Measurement(**fields | wrong)
