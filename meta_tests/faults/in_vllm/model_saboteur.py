"""Inject one known fault at a time into the served model. This module runs in vLLM's worker.

vLLM is started with ``--worker-extension-cls model_saboteur.Saboteur`` and in development mode.
``POST /collective_rpc {"method": "sabotage", "args": [NAME]}`` removes the present fault and
injects another. Faults of the checkpoint use vLLM's own loader, tensor by tensor; other faults are
patched into the running model. This module imports nothing of the suite.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.router import cpu_router
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Attention

Tensor = torch.Tensor
#: The changed tensors of the checkpoint, and the change of each.
Fault: TypeAlias = tuple[Callable[[str], bool], Callable[[Tensor], Tensor]]

NO_SINK = -1e30
BANG = 0  # the id of the token "!"
NOTHING = "nothing"


class _Packing:
    """The kernels for which vLLM packed the experts when it loaded them: AMX kernels or the
    portable ones."""

    isa = "vec"

    def __init__(self, pack: Callable[[Tensor, str], Tensor]) -> None:
        self._pack = pack

    def __call__(self, weight: Tensor, isa: str) -> Tensor:
        _Packing.isa = isa
        return self._pack(weight, isa)


# Set here, because this module is imported before the model is loaded.
cpu_moe.cpu_prepack_moe_weight = _Packing(cpu_moe.cpu_prepack_moe_weight)


class Patcher:
    """Sets attributes and tensors of the running engine, and restores them."""

    def __init__(self, worker: Any) -> None:
        self.runner = worker.model_runner
        self.model = self.runner.model
        self.layers = self.model.model.layers
        self._undo: list[Callable[[], None]] = []

    def set(self, target: Any, attribute: str, value: Any) -> None:
        before = getattr(target, attribute)
        is_its_own = attribute in vars(target)
        setattr(target, attribute, value)
        if is_its_own or isinstance(target, type):
            self._undo.append(lambda: setattr(target, attribute, before))
        else:
            self._undo.append(lambda: delattr(target, attribute))

    def write(self, tensor: Tensor, values: Tensor) -> None:
        before = tensor.clone()
        _copy(tensor, values)
        self._undo.append(lambda: _copy(tensor, before))

    def wrap(self, target: Any, attribute: str, around: Callable[..., Any]) -> None:
        """Replace a function by another one, which gets the original as its first argument."""
        before = getattr(target, attribute)
        self.set(target, attribute, lambda *args, **keywords: around(before, *args, **keywords))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def load_the_rest(self, tensors: dict[str, Tensor]) -> None:
        """Load the sinks and the experts, which `reload_weights` of vLLM 0.32 does not load on the
        CPU."""
        for n, layer in enumerate(self.layers):
            layer.attn.sinks.copy_(tensors[f"model.layers.{n}.self_attn.sinks"])
            experts = layer.mlp.experts.routed_experts
            for packed, stored in (("w13", "gate_up_proj"), ("w2", "down_proj")):
                name = f"model.layers.{n}.mlp.experts.{stored}"
                getattr(experts, f"{packed}_bias").copy_(tensors[f"{name}_bias"])
                weight = getattr(experts, f"{packed}_weight")
                plain = tensors[name].transpose(1, 2).contiguous().to(weight.dtype)
                weight.copy_(cpu_moe.cpu_prepack_moe_weight(plain, _Packing.isa).view_as(weight))

    # Helpers of several faults

    def output(self, change: Callable[[Tensor, Any], None], layer: int = 1) -> None:
        """Change the attention output [tokens, heads, size] of one layer.

        The change also gets the metadata."""
        broken = self.layers[layer].attn.attn.impl

        def run(forward: Any, impl: Any, *arguments: Any, **keywords: Any) -> Any:
            result = forward(impl, *arguments, **keywords)
            metadata = keywords.get("attn_metadata", arguments[5] if len(arguments) > 5 else None)
            if impl is broken and metadata is not None:
                out = keywords["output"] if "output" in keywords else arguments[6]
                change(out[: metadata.num_actual_tokens], metadata)
            return result

        self.wrap(Attention, "forward", run)

    def metadata(self, change: Callable[[Any], Any]) -> None:
        """Change every attention's metadata. The function `change` restores them itself."""

        def run(forward: Any, impl: Any, *arguments: Any, **keywords: Any) -> Any:
            changed = list(arguments)  # layer, q, k, v, cache, metadata, ...
            if changed[5] is not None:
                changed[5] = change(changed[5])
            return forward(impl, *changed, **keywords)

        self.wrap(Attention, "forward", run)

    def window(self, size: int) -> None:
        for layer in self.layers:
            impl = layer.attn.attn.impl
            if impl.sliding_window > 0:
                self.set(impl, "sliding_window", size)
        for groups in self.runner.attn_groups:
            for group in groups:
                builder = group.get_metadata_builder(0)
                if getattr(builder, "window_size", -1) > 0:
                    self.set(builder, "window_size", size)

    def rope(self, *, factor: float = 32.0, mscale: bool = True, off: bool = False) -> None:
        config = self.runner.model_config.hf_config
        rope = config.rope_parameters
        half = config.head_dim // 2
        base = rope["rope_theta"]
        original = rope["original_max_position_embeddings"]
        steps = torch.arange(half, dtype=torch.float64)
        frequency = base ** (-steps / half)
        scale = 1.0
        if not off:
            turns = [
                half * math.log(original / (beta * 2 * math.pi)) / math.log(base)
                for beta in (rope["beta_fast"], rope["beta_slow"])
            ]
            ramp = ((steps - turns[0]) / (turns[1] - turns[0])).clamp(0, 1)
            frequency = frequency * (1 - ramp) + frequency / factor * ramp
            scale = 0.1 * math.log(factor) + 1 if mscale else 1.0
        done = set()
        for layer in self.layers:
            cache = layer.attn.rotary_emb.cos_sin_cache
            if cache.data_ptr() in done:
                continue
            done.add(cache.data_ptr())
            angle = torch.arange(len(cache), dtype=torch.float32)[:, None] * frequency.float()
            self.write(cache, torch.cat((angle.cos(), angle.sin()), -1).to(cache.dtype) * scale)

    def routed(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Change the routing weights [tokens, k] of the chosen experts.

        The change also gets the experts' ids."""

        def run(experts: Any, out: Any, x: Any, w13: Any, w2: Any, b13: Any, b2: Any,
                shares: Any, ids: Any, *more: Any, **keywords: Any) -> Any:  # fmt: skip
            return experts(out, x, w13, w2, b13, b2, change(shares, ids), ids, *more, **keywords)

        self.wrap(cpu_moe, "cpu_fused_moe", run)

    def activation(self, *, alpha: float = 1.702, limit: float = 7.0, offset: float = 1.0) -> None:
        """Compute the experts again in PyTorch with another activation, from the weights of the
        checkpoint."""
        tensors = dict(checkpoint(self.runner.model_config.model))
        names = {
            layer.mlp.experts.routed_experts.w2_bias.data_ptr(): f"model.layers.{n}.mlp.experts"
            for n, layer in enumerate(self.layers)
        }

        def run(out: Tensor, x: Tensor, _w13: Any, _w2: Any, _b13: Any, b2: Tensor, shares: Tensor,
                ids: Tensor, *_more: Any, **_keywords: Any) -> None:  # fmt: skip
            name = names[b2.data_ptr()]
            parts = [
                tensors[f"{name}.{part}"].to(x.dtype)
                for part in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
            ]
            up, up_bias, down, down_bias = parts
            result = torch.zeros_like(x)
            for expert in range(len(up)):
                rows, slot = (ids == expert).nonzero(as_tuple=True)
                if not len(rows):
                    continue
                t = x[rows] @ up[expert] + up_bias[expert]
                gate = t[:, 0::2].clamp(max=limit)
                linear = t[:, 1::2].clamp(-limit, limit)
                t = gate * torch.sigmoid(alpha * gate) * (linear + offset)
                y = t @ down[expert] + down_bias[expert]
                result.index_add_(0, rows, y * shares[rows, slot, None].to(y.dtype))
            out.copy_(result)

        self.set(cpu_moe, "cpu_fused_moe", run)

    def logits(self, change: Callable[[Tensor], Tensor]) -> None:
        self.wrap(self.model, "compute_logits", lambda compute, states: change(compute(states)))


def _copy(tensor: Tensor, values: Tensor) -> None:
    # vLLM created some of its tensors in inference mode. They can only be changed in inference
    # mode.
    with torch.inference_mode():
        tensor.copy_(values)


def checkpoint(model: str) -> Iterator[tuple[str, Tensor]]:
    """Return every tensor of the served checkpoint."""
    for file in sorted(Path(model).glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - a safe_open handle is no dict
                yield name, handle.get_tensor(name)


class Saboteur:
    """A class that is mixed into vLLM's worker class."""

    def sabotage(self, name: str) -> str:
        """Inject a fault and remove the one before it. The name `nothing` injects none."""
        patcher = getattr(self, "_patcher", None)
        if patcher is None:
            patcher = self._patcher = Patcher(self)
            self._loaded = NOTHING
        patcher.undo()
        weights = name if name in WEIGHTS else NOTHING
        if weights != self._loaded:
            matches, change = WEIGHTS.get(weights, (lambda _key: False, lambda tensor: tensor))
            model = patcher.runner.model_config.model
            tensors = {
                key: change(tensor) if matches(key) else tensor for key, tensor in checkpoint(model)
            }
            with torch.inference_mode(False):
                patcher.runner.reload_weights(weights_iterator=iter(tensors.items()))
            with torch.no_grad():
                patcher.load_the_rest(tensors)
            self._loaded = weights
        if name in PATCHES:
            with torch.no_grad():
                PATCHES[name](patcher)
        elif name not in WEIGHTS and name != NOTHING:
            raise ValueError(f"no fault {name!r}")
        return name


# -------------------- faults of the checkpoint: changes of the loaded tensors whose names match


def _gate_and_up(change: Callable[[Tensor], Tensor]) -> Fault:
    """Change the weight [E, H, 2I] and the bias [E, 2I] of the experts' first matrix."""
    return lambda name: ".experts.gate_up_proj" in name, change


def _ends(*ends: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(ends)


def _is(name: str) -> Callable[[str], bool]:
    return lambda other: other == name


def _scaled(t: Tensor, part: Any) -> Tensor:
    """Change a part of a tensor by one step of its scale."""
    t = t.clone()
    t[part] *= 2
    return t


def _first_dropped(t: Tensor) -> Tensor:
    t = t.clone()
    t[0] = NO_SINK
    return t


_SKIPPED = ("o_proj.weight", "o_proj.bias", "experts.down_proj", "experts.down_proj_bias")
_KV = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
_PACKED = (
    "experts.gate_up_proj",
    "experts.down_proj",
)  # [E, in, out]; a byte contains two values along `in`
_DOWN = "mlp.experts.down_proj"

WEIGHTS: dict[str, Fault] = {
    "sinks zeroed": (_ends(".sinks"), torch.zeros_like),
    "sinks dropped": (_ends(".sinks"), lambda t: torch.full_like(t, NO_SINK)),
    "one head's sink dropped": (_is("model.layers.1.self_attn.sinks"), _first_dropped),
    "sinks of the heads in another order": (_ends(".sinks"), lambda t: t.roll(1)),
    "attention biases dropped": (
        lambda name: ".self_attn." in name and name.endswith("_proj.bias"),
        torch.zeros_like,
    ),
    "output bias of the attention dropped": (_ends("o_proj.bias"), torch.zeros_like),
    "router bias dropped": (_ends("router.bias"), torch.zeros_like),
    "expert biases dropped": (
        lambda name: ".experts." in name and name.endswith("_bias"),
        torch.zeros_like,
    ),
    "gate and up swapped": _gate_and_up(lambda t: t.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)),
    "gate and up read as halves, not interleaved": _gate_and_up(
        lambda t: t.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    ),
    "nibbles swapped": (_ends(*_PACKED), lambda t: t.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)),
    "one block's scale one step up": (
        _is(f"model.layers.1.{_DOWN}"),
        lambda t: _scaled(t, (0, slice(32), 9)),
    ),
    "one expert's scales one step up": (_is(f"model.layers.2.{_DOWN}"), lambda t: _scaled(t, 3)),
    "experts off by one": (lambda name: ".experts." in name, lambda t: t.roll(1, 0)),
    "one layer skipped": (
        lambda name: name.startswith("model.layers.2.") and name.endswith(_SKIPPED),
        torch.zeros_like,
    ),
    "KV heads in another order": (_ends(*_KV), lambda t: t.roll(64, 0)),
    "embedding rows shifted by one": (_is("model.embed_tokens.weight"), lambda t: t.roll(-1, 0)),
    "output matrix scaled by 1.02": (_is("lm_head.weight"), lambda t: t * 1.02),
    "output matrix shifted by one row": (_is("lm_head.weight"), lambda t: t.roll(-1, 0)),
    "last norm's weight left out": (_is("model.norm.weight"), torch.ones_like),
}


# -------------------- faults of the running model


PATCHES: dict[str, Callable[[Patcher], None]] = {
    "sliding window 127 for 128": lambda model: model.window(127),
    "sliding window 129 for 128": lambda model: model.window(129),
    "sliding window off": lambda model: model.window(-1),
    "YaRN off": lambda model: model.rope(off=True),
    "YaRN factor 16 for 32": lambda model: model.rope(factor=16.0),
    "YaRN mscale dropped": lambda model: model.rope(mscale=False),
    "SwiGLU alpha 1 for 1.702": lambda model: model.activation(alpha=1.0),
    "SwiGLU limit off": lambda model: model.activation(limit=float("inf")),
    "SwiGLU +1 dropped": lambda model: model.activation(offset=0.0),
    "one expert never computed": lambda model: model.routed(
        lambda shares, ids: shares * (ids != 5)
    ),
    "noise on the logits": lambda model: model.logits(
        lambda logits: logits + 0.1 * torch.randn_like(logits)
    ),
}


def patch(name: str, through: Callable[..., None] | None = None) -> Callable[..., Any]:
    """Register a fault of the running model: a function, or a change that `through` applies."""
    if through is None:
        return lambda function: PATCHES.setdefault(name, function)
    return lambda change: PATCHES.setdefault(name, lambda model: through(model, change))


@patch("top-3 for top-4", Patcher.routed)
def _(shares: Tensor, _ids: Tensor) -> Tensor:
    chosen = shares * (shares > shares.min(-1, keepdim=True).values)
    return chosen / chosen.sum(-1, keepdim=True)


@patch("shares of the experts not renormalised")
def _(model: Patcher) -> None:
    def softmax_topk(logits: Tensor, top_k: int, *_more: Any, **_keywords: Any) -> Any:
        shares, ids = logits.float().softmax(-1).topk(top_k, -1)
        return shares, ids.to(torch.int32)

    model.set(cpu_router, "_softmax_topk", softmax_topk)


@patch("the last slot of a KV block is not written")
def _(model: Patcher) -> None:
    def run(write: Any, impl: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> Any:
        slots = torch.where(slots % cache.shape[2] == cache.shape[2] - 1, slots - 1, slots)
        return write(impl, layer, key, value, cache, slots)

    model.wrap(Attention, "do_kv_cache_update", run)


@patch("a stale KV block: a sequence's second block is its first", Patcher.metadata)
def _(metadata: Any) -> Any:
    table = metadata.block_table.clone()
    if table.shape[1] > 1:
        table[:, 1] = torch.where(metadata.seq_lens > 160, table[:, 0], table[:, 1])
    return dataclasses.replace(metadata, block_table=table)


@patch("in a batch of four and more a sequence reads its neighbour's blocks", Patcher.metadata)
def _(metadata: Any) -> Any:
    if len(metadata.seq_lens) < 4:
        return metadata
    table = metadata.block_table.clone()
    table[-1] = table[-2]
    return dataclasses.replace(metadata, block_table=table)


def _queries(metadata: Any) -> Tensor:
    return metadata.query_start_loc[1:] - metadata.query_start_loc[:-1]


def _positions(metadata: Any) -> Tensor:
    """Return the position of every token of a step in its sequence."""
    lengths = _queries(metadata)
    ends = torch.repeat_interleave(metadata.query_start_loc[1:], lengths)
    last = torch.repeat_interleave(metadata.seq_lens, lengths)
    return last - (ends - torch.arange(len(ends)))


@patch("wrong in a batch only", Patcher.output)
def _(out: Tensor, metadata: Any) -> None:
    if len(metadata.seq_lens) > 1:
        out *= 1.1


@patch("wrong after a hit of the prefix cache only", Patcher.output)
def _(out: Tensor, metadata: Any) -> None:
    lengths = _queries(metadata)
    hit = (lengths > 1) & (metadata.seq_lens > lengths)
    out[torch.repeat_interleave(hit, lengths)] *= 1.1


@patch("wrong past 128 tokens only", Patcher.output)
def _(out: Tensor, metadata: Any) -> None:
    out[_positions(metadata) >= 128] *= 1.1


@patch("wrong in decode only", Patcher.output)
def _(out: Tensor, metadata: Any) -> None:
    lengths = _queries(metadata)
    out[torch.repeat_interleave(lengths == 1, lengths)] *= 1.1


@patch("wrong past 128 tokens in decode only", Patcher.output)
def _(out: Tensor, metadata: Any) -> None:
    lengths = _queries(metadata)
    decoded = torch.repeat_interleave(lengths == 1, lengths)
    out[decoded & (_positions(metadata) >= 128)] *= 1.1


@patch("positions past 4096 held at 4095")
def _(model: Patcher) -> None:
    def held(forward: Any, positions: Tensor, *rest: Any, **keywords: Any) -> Any:
        return forward(positions.clamp(max=4095), *rest, **keywords)

    for layer in model.layers:
        rope = layer.attn.rotary_emb
        if "forward" not in vars(rope):
            model.wrap(rope, "forward", held)


@patch("another result every time", Patcher.output)
def _(out: Tensor, _metadata: Any) -> None:
    out *= 1 + 0.05 * torch.randn_like(out)


@patch("attention rounded to BF16 where float32 was asked for")
def _(model: Patcher) -> None:
    for layer in range(len(model.layers)):
        model.output(lambda out, _metadata: out.copy_(out.bfloat16()), layer)


@patch("NaN past 256 tokens", Patcher.output)
def _(out: Tensor, metadata: Any) -> None:
    out[_positions(metadata) >= 256] = float("nan")


@patch("only ! comes out", Patcher.logits)
def _(logits: Tensor) -> Tensor:
    logits[:, BANG] += 100
    return logits


@patch("one token over and over after a while")
def _(model: Patcher) -> None:
    steps = [0]

    def change(logits: Tensor) -> Tensor:
        steps[0] += 1
        if steps[0] % 64 > 16:
            logits[:, 623] += 100
        return logits

    model.logits(change)


@patch("the best token of a prefill is never chosen")
def _(model: Patcher) -> None:
    prefill = [False]

    def change(_out: Tensor, metadata: Any) -> None:
        prefill[0] = metadata.max_query_len > 1

    def second(logits: Tensor) -> Tensor:
        if prefill[0]:
            logits.scatter_(1, logits.argmax(-1, keepdim=True), -100.0)
        return logits

    model.output(change)
    model.logits(second)
