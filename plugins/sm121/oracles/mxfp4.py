"""The MXFP4 number format: blocks of 32 E2M1 elements, with one E8M0 scale per block.

The module was written from the OCP Microscaling Formats (MX) specification v1.0, in NumPy float64,
in which every MXFP4 value and every product of an element and a scale is exact. The byte order is
that of the gpt-oss checkpoints: element 2j is in the low nibble of byte j, element 2j+1 in the high
nibble.
"""

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: The number of elements that share one scale.
BLOCK = 32
#: The values of the E2M1 codes 0..7. The codes 8..15 have the same magnitudes and a minus sign.
E2M1_VALUES: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The exponent bias of a scale.
E8M0_BIAS = 127
#: The code of the scale NaN.
E8M0_NAN = 0xFF
#: The value of each of the 16 E2M1 codes.
CODE_VALUES = np.array(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), dtype=np.float64)
#: The exponent of the largest E2M1 value, 6 = 1.5 * 2^2.
_ELEMENT_EMAX = 2
#: The mantissa in [0.5, 1) of the largest E2M1 value, 6 = 0.75 * 2^3.
_ELEMENT_MANTISSA = 0.75
#: The position of the sign bit in an E2M1 code.
_SIGN_BIT = 3

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]


class ScaleRule(enum.Enum):
    """How a quantiser chooses a block's scale from the largest magnitude in it (amax)."""

    #: 2^(floor(log2 amax) - 2): OCP MX v1.0 section 6.3, llama.cpp's weights. Magnitudes above 6
    #: saturate.
    OCP_FLOOR = "ocp-floor"
    #: The smallest power of two that is >= amax / 6: the default of FlashInfer and triton_kernels.
    #: Never saturates.
    CEIL = "ceil"
    #: 2^(floor(log2 r) - 2), where r is amax rounded to one mantissa bit: (bits + 0x200000) &
    #: 0x7F800000 in vLLM's Triton `downcast_to_mxfp` (mxfp4_utils, 0.33). An amax of 7 * 2^k or
    #: more gets the next larger scale.
    VLLM_RNE = "vllm-rne"
    #: 2^(round(log2 amax) - 2): llama.cpp's activations on Blackwell (quantize.cu,
    #: `compute_e8m0_scale`). Not idempotent.
    ROUND_LOG2 = "round-log2"


def unpack(packed: Bytes) -> Bytes:
    """Return the E2M1 codes of packed bytes.

    Args:
        packed: [..., n] u8.

    Returns:
        [..., 2n] u8 codes 0..15, low nibble first.
    """
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.uint8)
    codes[..., 0::2] = packed & 0x0F
    codes[..., 1::2] = packed >> 4
    return codes


def pack(codes: Bytes) -> Bytes:
    """Return packed bytes, the inverse of `unpack`. The codes are not checked.

    Args:
        codes: [..., 2n] u8 codes 0..15.

    Returns:
        [..., n] u8.
    """
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def decode_scale(scales: Bytes) -> Floats:
    """Return the values of E8M0 bytes: 2^(b - 127), and NaN for 0xFF.

    Args:
        scales: Any shape, u8.

    Returns:
        The same shape, float64.
    """
    values = np.ldexp(1.0, scales.astype(np.int32) - E8M0_BIAS)
    return np.where(scales == E8M0_NAN, np.nan, values)


def dequantise(packed: Bytes, scales: Bytes) -> Floats:
    """Return the values of packed MXFP4. A block with scale 0xFF is NaN throughout.

    Args:
        packed: [..., K/2] u8.
        scales: [..., K/32] u8.

    Returns:
        [..., K] float64, exact.

    Raises:
        ValueError: The shapes do not match.
    """
    if (*scales.shape[:-1], scales.shape[-1] * BLOCK // 2) != packed.shape:
        raise ValueError(f"scales {scales.shape} do not belong to packed elements {packed.shape}")
    elements = CODE_VALUES[unpack(packed)]
    blocks = elements.reshape(*scales.shape, BLOCK) * decode_scale(scales)[..., None]
    return blocks.reshape(elements.shape)


def nearest_codes(values: Floats, magnitudes: Sequence[float] | Floats, sign: int) -> Bytes:
    """Return the code nearest to each value. Ties go to the even code, large values saturate.

    Args:
        values: Any shape.
        magnitudes: The magnitudes of the codes 0, 1, 2, ..., ascending.
        sign: The position of the sign bit in a code.

    Returns:
        The same shape, u8.

    Raises:
        ValueError: A value is NaN.
    """
    if np.isnan(values).any():
        raise ValueError("NaN has no code of its own")
    table = np.asarray(magnitudes)
    magnitude = np.minimum(np.abs(values), table[-1])
    midpoints = (table[1:] + table[:-1]) / 2
    below = np.searchsorted(midpoints, magnitude, side="left")
    above = np.searchsorted(midpoints, magnitude, side="right")
    # At a midpoint, the two searches differ by one. Take the even code.
    codes = np.where(below % 2 == 0, below, above)
    signs = np.signbit(values).astype(np.int64) << sign
    signed: Bytes = (codes | signs).astype(np.uint8)
    return signed


def encode_elements(values: Floats) -> Bytes:
    """Return the nearest E2M1 codes; see `nearest_codes`.

    Args:
        values: The elements, already divided by their scales. Any shape.

    Returns:
        The same shape, u8: the sign in bit 3.

    Raises:
        ValueError: A value is NaN.
    """
    return nearest_codes(values, E2M1_VALUES, sign=_SIGN_BIT)


def choose_scale(
    amax: Floats, rule: ScaleRule, emax: int = _ELEMENT_EMAX, *, ceil: float = _ELEMENT_MANTISSA
) -> Bytes:
    """Return the E8M0 byte for each block's largest magnitude.

    Args:
        amax: The largest magnitudes, any shape.
        rule: The scale rule.
        emax: The exponent of the largest element, which equals 2 * ceil * 2^emax.
        ceil: The mantissa of the largest element, in [0.5, 1).

    Returns:
        The same shape, u8; 0 for an all-zero block.

    Raises:
        ValueError: A magnitude is not finite.
    """
    if not np.isfinite(amax).all():
        raise ValueError("a block holds a value that is not finite")
    # amax = m * 2^e with m in [0.5, 1), so that floor(log2 amax) = e - 1 exactly.
    # VLLM_RNE: 0x200000 is a quarter of a binade's mantissa range; m >= 0.875 carries into the
    # exponent.
    # ROUND_LOG2: log2(m * 2^e) rounds up iff m > sqrt(1/2), which no binary number equals.
    # CEIL: with 6 = 0.75 * 2^3 and k = e - 3, amax <= 6 * 2^k iff m <= 0.75.
    mantissa, e = np.frexp(amax)
    goes_up = {
        ScaleRule.OCP_FLOOR: np.zeros_like(mantissa, dtype=bool),
        ScaleRule.VLLM_RNE: mantissa >= 0.875,
        ScaleRule.ROUND_LOG2: mantissa > np.sqrt(0.5),
        ScaleRule.CEIL: mantissa > ceil,
    }[rule]
    exponent = np.where(goes_up, e, e - 1) - emax
    exponent = np.where(amax == 0, -E8M0_BIAS, exponent)
    scales: Bytes = np.clip(exponent + E8M0_BIAS, 0, E8M0_NAN - 1).astype(np.uint8)
    return scales
