"""The MXFP8 number format: blocks of 32 E4M3 elements, with one E8M0 scale per block.

The module was written from the OCP Microscaling Formats (MX) specification v1.0 and, for E4M3, the
OCP 8-bit Floating Point specification (OFP8) v1.0, in NumPy float64, in which every value is exact.
E4M3 has no infinity; S.1111.111 is NaN, and 448 is the largest value.
"""

import enum

import numpy as np

from sm121.oracles import mxfp4
from sm121.oracles.mxfp4 import Bytes, Floats

#: The exponent of the largest E4M3 value, 448 = 1.75 * 2^8.
_ELEMENT_EMAX = 8
#: The mantissa of the largest E4M3 value, in [0.5, 1): 448 = 0.875 * 2^9.
_ELEMENT_MANTISSA = 0.875
_NAN_CODE = 0x7F
#: The position of the sign bit in an E4M3 code.
_SIGN_BIT = 7


class ScaleRule(enum.Enum):
    """How a quantiser chooses a block's scale from the largest magnitude in it (amax)."""

    #: 2^(floor(log2 amax) - 8): OCP MX v1.0 section 6.3. Magnitudes above 448 saturate.
    OCP_FLOOR = "ocp-floor"
    #: The smallest power of two that is >= amax / 448: FlashInfer's cvt_warp_fp16_to_mxfp8.
    CEIL = "ceil"


def _values() -> Floats:
    codes = np.arange(0x80)
    exponent = codes >> 3
    mantissa = codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    subnormal = np.ldexp(mantissa / 8, -6)
    magnitudes = np.where(exponent == 0, subnormal, normal)
    magnitudes[_NAN_CODE] = np.nan
    return np.concatenate((magnitudes, -magnitudes))


#: The value of each of the 256 E4M3 codes; 0x7F and 0xFF are NaN.
E4M3_VALUES: Floats = _values()


def encode_elements(values: Floats) -> Bytes:
    """Return the nearest E4M3 codes; see `mxfp4.nearest_codes`.

    Args:
        values: The elements, already divided by their scales. Any shape.

    Returns:
        The same shape, u8.

    Raises:
        ValueError: A value is NaN.
    """
    return mxfp4.nearest_codes(values, E4M3_VALUES[:_NAN_CODE], sign=_SIGN_BIT)


def choose_scale(amax: Floats, rule: ScaleRule) -> Bytes:
    """Return the E8M0 byte for each block's largest magnitude; see `mxfp4.choose_scale`.

    Args:
        amax: The largest magnitudes, any shape.
        rule: The scale rule.
    """
    same_rule = mxfp4.ScaleRule(rule.value)
    return mxfp4.choose_scale(amax, same_rule, _ELEMENT_EMAX, ceil=_ELEMENT_MANTISSA)
