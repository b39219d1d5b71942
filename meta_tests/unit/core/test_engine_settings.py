"""A setting for certain releases also applies to an engine of unknown release that has the
setting's options."""

import pytest

from sm121.core.engine_settings import ReleaseSetting

OPTIONS = {"--attention-config", "--tensor-parallel-size"}


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        pytest.param(("--attention-config.backend=X",), True, id="key after a dot"),
        pytest.param(("--attention_config", "X"), True, id="underscores"),
        pytest.param(("-tp", "2"), True, id="short name"),
        pytest.param(("--unknown", "X"), False, id="unknown option"),
    ],
)
def test_a_setting_fits_an_engine_that_has_its_options(arguments, fits):
    setting = ReleaseSetting(versions=">=0.20", arguments=arguments, source="a test")
    assert setting.fits(None, OPTIONS) is fits
