"""Kernel providers for `--kernel-provider NAME:OBJECT`: correct and faulty ones."""

import os
import time

from sm121.kernels.torch_provider import TorchProvider


class Wrong(TorchProvider):
    def lm_head(self, x, weight):
        return super().lm_head(x, weight) * 1.01

    def route(self, logits, k):
        shares, ids = super().route(logits, k)
        return shares * 1.01, ids


class Slow(TorchProvider):
    def lm_head(self, x, weight):
        time.sleep(0.5)
        return super().lm_head(x, weight)


class Steady(TorchProvider):
    """A provider whose experts take the same time in each call."""

    seconds = 0.4

    def fused_moe(self, *arguments, **keywords):
        began = time.perf_counter()
        y = super().fused_moe(*arguments, **keywords)
        time.sleep(max(0.0, began + self.seconds - time.perf_counter()))
        return y


class Slower(Steady):
    """A provider that is 15 % slower."""

    seconds = 0.46


class Tuned(TorchProvider):
    """A provider with several tactics, each with its own fault."""

    tactic = "right"

    def tactics(self, operation):
        return ("right", "wrong", "crash", "hang")

    def with_tactic(self, tactic):
        fixed = Tuned()
        fixed.tactic = tactic
        return fixed

    def fused_moe(self, *arguments, **keywords):
        if self.tactic == "crash":
            os.abort()
        if self.tactic == "hang":
            time.sleep(600)
        return super().fused_moe(*arguments, **keywords) * (1.01 if self.tactic == "wrong" else 1)


class Faulty(TorchProvider):
    """A provider that aborts, causes a device fault or ends its process, depending on the number of
    tokens."""

    def route(self, logits, k):
        if len(logits) == 1:
            os.abort()
        if len(logits) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        if len(logits) == 3:
            os._exit(0)
        return super().route(logits, k)


clean = TorchProvider()
wrong = Wrong()
slow = Slow()
tuned = Tuned()
faulty = Faulty()
steady = Steady()
slower = Slower()
empty = object()
