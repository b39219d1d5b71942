"""Build the problem of a case: tensors, and a judge of the output.

Random values are drawn with the case's seed. The oracle computes its result when the problem is
built.
"""

import functools

from sm121.kernels import attention_problems, cases, codec_problems, expert_problems
from sm121.kernels.problem import Problem


@functools.singledispatch
def build(case: cases.Case) -> Problem:
    """Build the problem of a case.

    Args:
        case: One of the cases of `sm121.kernels.cases`.

    Raises:
        TypeError: The case is of an unknown kind.
    """
    raise TypeError(f"expected one of the cases of sm121.kernels.cases, not {type(case).__name__}")


build.register(cases.DequantiseCase, codec_problems.dequantise)
build.register(cases.QuantiseCase, codec_problems.quantise)
build.register(cases.BytesCase, codec_problems.from_bytes)
build.register(cases.RouteCase, expert_problems.route)
build.register(cases.MoeCase, expert_problems.experts)
build.register(cases.LinearCase, expert_problems.linear)
build.register(cases.PrefillCase, attention_problems.prefill)
build.register(cases.DecodeCase, attention_problems.decode)
