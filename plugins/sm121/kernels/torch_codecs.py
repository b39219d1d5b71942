"""MXFP4, MXFP8 and E4M3 in plain PyTorch: the codecs of the provider `torch`.

The codecs were written independently of the oracle, and each uses another formula than the
oracle's. Each method is a step at which a kernel can be wrong, so that a mutant in the meta-tests
can inject this fault by overriding one method.
"""

import torch
from torch import Tensor

#: The number of elements that share one scale in the OCP microscaling formats.
BLOCK = 32
#: The positive values of E2M1 by their codes.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The largest value of E2M1.
_E2M1_MAX = 6.0
#: The largest value of E4M3 (float8_e4m3fn).
_E4M3_MAX = 448.0
#: The bias of an E8M0 scale.
_E8M0_BIAS = 127
#: The E8M0 byte of NaN.
_E8M0_NAN = 0xFF


class TorchCodecs:
    """The quantisers and the dequantiser, on any device."""

    def mxfp4_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x in MXFP4.

        Args:
            x: [M, K].

        Returns:
            The packed elements [M, K/2] u8 and the scales [M, K/32] u8 E8M0.
        """
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        scales = self.block_scales(blocks.abs().amax(-1), _E2M1_MAX)
        scaled = times_power_of_two(blocks, _E8M0_BIAS - scales.int())
        codes = self.e2m1_codes(scaled).flatten(-2)
        return self.pack(codes), scales

    def block_scales(self, amax: Tensor, largest: float) -> Tensor:
        """Return the scales of blocks by the rule `ceil`.

        Args:
            amax: The largest magnitude of each block.
            largest: The largest value of the element's format.

        Returns:
            The smallest power of two with amax / scale <= largest: u8 E8M0 in the shape of `amax`.
        """
        mantissa, exponent = torch.frexp(amax / largest)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        exponent = torch.where(amax == 0, -_E8M0_BIAS, exponent)
        return (exponent + _E8M0_BIAS).clamp(0, 254).to(torch.uint8)

    def e2m1_codes(self, values: Tensor) -> Tensor:
        """Return the codes of the nearest E2M1 values, ties to even.

        Args:
            values: Values of any shape. The step of the grid is 0.5 up to 2, 1 up to 4, then 2.
        """
        size = values.abs().clamp(max=_E2M1_MAX)
        low = (size * 2).round()
        middle = size.round() + 2
        high = (size / 2).round() + 4
        code = torch.where(size < 2, low, torch.where(size < 4, middle, high))
        sign = values.signbit().to(torch.uint8) * 8
        return (code.to(torch.uint8) + sign).to(torch.uint8)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack two E2M1 codes into each byte.

        Args:
            codes: [..., K] u8, with 4 bits each; K is even.

        Returns:
            [..., K/2] u8, with the even element in the low nibble.
        """
        return codes[..., 0::2] | (codes[..., 1::2] << 4)

    def mxfp4_dequantize(self, packed: Tensor, scales: Tensor) -> Tensor:
        """Decode MXFP4.

        Args:
            packed: [..., K/2] u8.
            scales: [..., K/32] u8 E8M0.

        Returns:
            The values [..., K] float32.
        """
        positive = torch.tensor(_E2M1, device=packed.device)
        values = torch.cat((positive, -positive))
        pairs = torch.cartesian_prod(values, values)
        elements = self.order_nibbles(pairs)[packed.int()].flatten(-2)
        blocks = elements.unflatten(-1, (-1, BLOCK))
        return (blocks * self.scale_values(scales)[..., None]).flatten(-2)

    def order_nibbles(self, pairs: Tensor) -> Tensor:
        """Return the elements of each byte in their order.

        Args:
            pairs: [256, 2], the values of the high and the low nibble.

        Returns:
            [256, 2], the values of the even and the odd element.
        """
        return pairs.flip(-1)

    def scale_values(self, scales: Tensor) -> Tensor:
        """Return the values of E8M0 scales.

        Args:
            scales: u8 of any shape; a byte stands for 2^(byte - 127), and 0xFF for NaN.

        Returns:
            The same shape in float32.
        """
        ones = torch.ones_like(scales, dtype=torch.float32)
        powers = times_power_of_two(ones, scales.int() - _E8M0_BIAS)
        return torch.where(scales == _E8M0_NAN, torch.nan, powers)

    def mxfp8_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x in MXFP8.

        Args:
            x: [M, K].

        Returns:
            The elements [M, K] float8_e4m3fn and the scales [M, K/32] u8 E8M0.
        """
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        scales = self.block_scales(blocks.abs().amax(-1), _E4M3_MAX)
        scaled = times_power_of_two(blocks, _E8M0_BIAS - scales.int()).flatten(-2)
        return self.e4m3(scaled), scales

    def e4m3(self, values: Tensor) -> Tensor:
        """Return the nearest E4M3 values, saturated at +-448.

        Args:
            values: Values of any shape.

        Returns:
            The same shape in float8_e4m3fn.
        """
        return values.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def times_power_of_two(values: Tensor, exponents: Tensor) -> Tensor:
    """Return values * 2^exponents, exact in float32.

    The product is computed in two steps, because 2^exponent itself may overflow float32.

    Args:
        values: [..., n] or [...].
        exponents: [...], integers.
    """
    if exponents.dim() < values.dim():
        exponents = exponents[..., None]
    half = exponents // 2
    return torch.ldexp(torch.ldexp(values, half), exponents - half)
