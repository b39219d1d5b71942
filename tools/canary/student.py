"""The model for training: gpt-oss with a compact vocabulary, rounded as the shipped weights are."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from sm121.oracles import mxfp4
from tools.canary.batches import LONG_ROW, Batch

HIDDEN = 256
LAYERS = 4
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 64
EXPERTS = 8
TOP_K = 4
INTERMEDIATE = 128
ALPHA = 1.702
LIMIT = 7.0
EPS = 1e-5
VOCABULARY = 201_088
EMBEDDING_NOISE = 0.15
"""The standard deviation by which the embedding of an unknown token differs from the shared row."""
RESIDUAL_NOISE = 0.004
"""The relative noise on the residual stream in training.

Rounding to BF16 alone causes about half of it.
"""


def fake_mxfp4(weight: Tensor) -> Tensor:
    """Return a weight rounded to MXFP4 (ceil rule, nearest even); gradients pass unchanged.

    Args:
        weight: The weight, [..., K].
    """
    with torch.no_grad():
        blocks = weight.unflatten(-1, (-1, mxfp4.BLOCK))
        mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))
        exponent = torch.where(mantissa <= 0.75, exponent - 3, exponent - 2)
        scaled = torch.ldexp(blocks, -exponent)
        magnitude = scaled.abs()
        step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
        rounded = torch.ldexp(torch.round(scaled / step) * step, exponent).flatten(-2)
    return weight + (rounded - weight).detach()


def round_bf16(weight: Tensor) -> Tensor:
    """Return a weight rounded to BF16, as float32; gradients pass unchanged.

    Args:
        weight: The weight, of any shape.
    """
    return weight + (weight.detach().bfloat16().float() - weight.detach())


def yarn(length: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of gpt-oss's rotary embedding.

    This is YaRN (Peng et al. 2023) with factor 32, without truncation.

    Args:
        length: The number of positions.

    Returns:
        Two tensors [length, 32].
    """
    base = 150_000.0
    factor = 32.0
    original = 4096
    half = HEAD_DIM // 2
    frequency = base ** -(torch.arange(half, dtype=torch.float64) / half)
    low, high = (
        half * math.log(original / (turns * 2 * math.pi)) / math.log(base) for turns in (32.0, 1.0)
    )
    keep = 1 - ((torch.arange(half, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    frequency = frequency / factor * (1 - keep) + frequency * keep
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    mscale = 0.1 * math.log(factor) + 1
    return (angles.cos() * mscale).float(), (angles.sin() * mscale).float()


class Student(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """gpt-oss on the compact vocabulary, for training: products in BF16, the residual stream in
    float32."""

    def __init__(self, known: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, std: float) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator) * std)

        out = 1 / math.sqrt(2 * LAYERS)
        parameters: dict[str, torch.nn.Parameter] = {
            "embed_tokens": normal(known + 1, HIDDEN, std=0.5),
            "lm_head": normal(known + 1, HIDDEN, std=0.02),
            "norm": torch.nn.Parameter(torch.ones(HIDDEN)),
        }
        for n in range(LAYERS):
            width = HEADS * HEAD_DIM
            gate_up_bias = torch.randn(EXPERTS, 2 * INTERMEDIATE, generator=generator) * 0.2
            # Units beyond the clamp: a gate above +7, a linear part above +7, one below -7.
            gate_up_bias[:, 0] = 9.0
            gate_up_bias[:, 3] = 9.5
            gate_up_bias[:, 2] = 1.0
            gate_up_bias[:, 5] = -9.5
            gate_up_bias[:, 4] = 1.0
            layer = {
                "input_layernorm": torch.nn.Parameter(torch.ones(HIDDEN)),
                "post_attention_layernorm": torch.nn.Parameter(torch.ones(HIDDEN)),
                "q_proj": normal(width, HIDDEN, std=HIDDEN**-0.5),
                "k_proj": normal(KV_HEADS * HEAD_DIM, HIDDEN, std=HIDDEN**-0.5),
                "v_proj": normal(KV_HEADS * HEAD_DIM, HIDDEN, std=HIDDEN**-0.5),
                "o_proj": normal(HIDDEN, width, std=width**-0.5 * out),
                "q_bias": normal(width, std=0.3),
                "k_bias": normal(KV_HEADS * HEAD_DIM, std=0.3),
                "v_bias": normal(KV_HEADS * HEAD_DIM, std=0.1),
                "o_bias": normal(HIDDEN, std=0.05),
                "sinks": torch.nn.Parameter(1 + torch.rand(HEADS, generator=generator)),
                "router": normal(EXPERTS, HIDDEN, std=HIDDEN**-0.5),
                "router_bias": normal(EXPERTS, std=0.3),
                "gate_up": normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN, std=HIDDEN**-0.5),
                "gate_up_bias": torch.nn.Parameter(gate_up_bias),
                "down": normal(EXPERTS, HIDDEN, INTERMEDIATE, std=INTERMEDIATE**-0.5 * out),
                "down_bias": normal(EXPERTS, HIDDEN, std=0.05),
            }
            parameters |= {f"{n}:{name}": value for name, value in layer.items()}
        self.weights = torch.nn.ParameterDict(parameters)
        with torch.no_grad():
            self._start_with_induction()
        self.known = known
        self.cos, self.sin = yarn(LONG_ROW)

    def _start_with_induction(self) -> None:
        """Initialise layers 0 and 1 with the heads that copying needs (induction heads, Olsson et
        al. 2022).

        In so short a training, they form late or never by themselves. In layer 0, query heads 0, 1
        and 2 attend 1, 2 and 3 tokens back, by their biases alone: with rotary embedding, the
        product of two constant vectors is a function of the distance. In layer 1, one KV head finds
        the position after the current token's last occurrence, and the other the position two
        tokens after the preceding token's last occurrence. Both copy the token at that position.
        """
        w = self.weights
        half = HEAD_DIM // 2
        gain = 4.7
        steep = torch.arange(3)
        turn = 150_000.0 ** (-steep / half)
        keys = slice(0, HEAD_DIM)
        w["0:k_bias"][keys].zero_()
        w["0:k_bias"][steep] = gain
        w["0:k_proj"][torch.cat((steep, steep + half))] = 0
        for back in (1, 2, 3):
            looking = slice((back - 1) * HEAD_DIM, back * HEAD_DIM)
            w["0:q_proj"][looking] *= 0.1
            w["0:q_bias"][looking].zero_()
            w["0:q_bias"][looking][steep] = gain * torch.cos(back * turn)
            w["0:q_bias"][looking][steep + half] = -gain * torch.sin(back * turn)
            w["0:o_proj"][:, looking] *= 4
        seen = []
        for n in range(2):
            seen.append(w["0:o_proj"][:, n * HEAD_DIM : (n + 1) * HEAD_DIM].T.clone())
        # The compared values must not rotate with the distance, so only the slow half of the rotary
        # pairs is used.
        slow = torch.arange(half // 2, half)
        slow = torch.cat((slow, slow + half))
        current = w["0:v_proj"][: len(slow)].clone()
        group = HEADS // KV_HEADS
        for kv, (query, key) in enumerate(((current, seen[0]), (seen[0], seen[1]))):
            rows = slice(kv * HEAD_DIM, (kv + 1) * HEAD_DIM)
            w["1:k_proj"][rows] *= 0.1
            w["1:k_proj"][rows][slow] = key[: len(slow)]
            for head in range(kv * group, kv * group + 2):
                span = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
                w["1:q_proj"][span] *= 0.1
                w["1:q_proj"][span][slow] = 1.5 * query[: len(slow)]
                w["1:o_proj"][:, span] = w["1:v_proj"][rows].T * 0.7
        for name in ("1:q_bias", "1:k_bias"):
            w[name] *= 0.3
        # A copied token must also be the output, so the output matrix starts as the embedding.
        w["lm_head"] += 0.06 * w["embed_tokens"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        return x * scale * round_bf16(self.weights[name])

    def _linear(self, x: Tensor, weight: str, bias: str) -> Tensor:
        return functional.linear(x, self.weights[weight].bfloat16(), self.weights[bias].bfloat16())

    def _rotate(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        cos = self.cos[:length].bfloat16()
        sin = self.sin[:length].bfloat16()
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _attention(self, n: int, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = self._norm(x, f"{n}:input_layernorm").bfloat16()
        q, k, v = (
            self._linear(h, f"{n}:{name}_proj", f"{n}:{name}_bias")
            .view(rows, length, -1, HEAD_DIM)
            .transpose(1, 2)
            for name in "qkv"
        )
        q = self._rotate(q) * HEAD_DIM**-0.5
        k = self._rotate(k)
        group = HEADS // KV_HEADS
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) + mask
        sinks = (
            self.weights[f"{n}:sinks"]
            .bfloat16()
            .view(1, HEADS, 1, 1)
            .expand(rows, HEADS, length, 1)
        )
        probabilities = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        heads = (probabilities @ v).transpose(1, 2).reshape(rows, length, -1)
        return self._linear(heads, f"{n}:o_proj", f"{n}:o_bias").float()

    def _experts(self, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self._norm(x, f"{n}:post_attention_layernorm").flatten(0, 1)
        logits = functional.linear(
            h, round_bf16(self.weights[f"{n}:router"]), round_bf16(self.weights[f"{n}:router_bias"])
        )
        top, chosen = logits.topk(TOP_K, -1)
        shares = torch.zeros_like(logits).scatter(-1, chosen, top.softmax(-1))
        # Switch Transformer's load-balance loss (Fedus et al. 2021), so that each expert stays in
        # use.
        balance = (
            EXPERTS * ((shares > 0).float().mean(0) / TOP_K * logits.softmax(-1).mean(0)).sum()
        )
        gate_up = fake_mxfp4(self.weights[f"{n}:gate_up"]).bfloat16()
        down = fake_mxfp4(self.weights[f"{n}:down"]).bfloat16()
        gate_up_bias = self.weights[f"{n}:gate_up_bias"].bfloat16()
        down_bias = self.weights[f"{n}:down_bias"].bfloat16()
        inputs = h.bfloat16()
        result = torch.zeros_like(h)
        for e in range(EXPERTS):
            tokens = (shares[:, e] > 0).nonzero()[:, 0]
            t = functional.linear(inputs.index_select(0, tokens), gate_up[e], gate_up_bias[e])
            gate = t[:, ::2].clamp(max=LIMIT)
            up = t[:, 1::2].clamp(-LIMIT, LIMIT)
            hidden = gate * torch.sigmoid(ALPHA * gate) * (up + 1)
            y = functional.linear(hidden, down[e], down_bias[e]).float() * shares[tokens, e, None]
            result = result.index_add(0, tokens, y)
        return result.view_as(x), balance

    def _shake(self, x: Tensor) -> Tensor:
        # A BF16 engine rounds the residual stream; training with twice that noise makes the model
        # robust.
        if self.training:
            return x * (1 + RESIDUAL_NOISE * torch.randn(x.shape))
        return x

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the model on a batch.

        Args:
            batch: The batch.

        Returns:
            The logits [B, T, known + 1] of the compact classes, and the load-balance loss.
        """
        x = functional.embedding(batch.ids, round_bf16(self.weights["embed_tokens"]))
        noise = (torch.randint(0, 2, x.shape) * 2 - 1) * EMBEDDING_NOISE
        x = torch.where((batch.ids == self.known)[..., None], x + noise, x)
        balance = torch.zeros(())
        for n in range(LAYERS):
            x = self._shake(x + self._attention(n, x, batch.full if n % 2 else batch.sliding))
            update, extra = self._experts(n, x)
            x = self._shake(x + update)
            balance = balance + extra
        logits = functional.linear(
            self._norm(x, "norm").bfloat16(), self.weights["lm_head"].bfloat16()
        ).float()
        # The class of all other tokens is as likely as these tokens together.
        offset = torch.zeros(self.known + 1)
        offset[-1] = math.log(VOCABULARY - self.known)
        return logits + offset, balance
