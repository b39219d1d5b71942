"""The MXFP8 number format with E4M3 elements: 32 to a block, one E8M0 scale a block. Written from
the OCP Microscaling Formats (MX) specification v1.0 and, for E4M3, from the OCP 8-bit Floating
Point specification (OFP8) v1.0, in NumPy float64, where every value is exact. E4M3 has no infinity;
S.1111.111 is NaN and 448 the largest value."""

import enum

import numpy as np

from sm121.oracles import mxfp4
from sm121.oracles.mxfp4 import Bytes, Floats

_ELEMENT_EMAX = 8
_NAN_CODE = 0x7F


class ScaleRule(enum.Enum):
    """How a quantiser chooses a block's scale from the largest magnitude in it (amax)."""

    OCP_FLOOR = "ocp-floor"
    """2^(floor(log2 amax) - 8): OCP MX v1.0 section 6.3. Magnitudes above 448 saturate."""

    CEIL = "ceil"
    """The least power of two that is >= amax / 448: FlashInfer's cvt_warp_fp16_to_mxfp8."""


def _values() -> Floats:
    codes = np.arange(0x80)
    exponent, mantissa = codes >> 3, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    magnitudes = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    magnitudes[_NAN_CODE] = np.nan
    return np.concatenate((magnitudes, -magnitudes))


E4M3_VALUES: Floats = _values()
"""The value of each of the 256 E4M3 codes; 0x7F and 0xFF are NaN."""


def encode_elements(values: Floats) -> Bytes:
    """The nearest E4M3 codes; see `mxfp4.nearest_codes`."""
    return mxfp4.nearest_codes(values, E4M3_VALUES[:_NAN_CODE], sign=7)


def choose_scale(amax: Floats, rule: ScaleRule) -> Bytes:
    """The E8M0 byte for each block's largest magnitude; see `mxfp4.choose_scale`."""
    # 448 = 0.875 * 2^9.
    return mxfp4.choose_scale(amax, mxfp4.ScaleRule(rule.value), _ELEMENT_EMAX, ceil=0.875)
