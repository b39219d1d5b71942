"""Inject one known fault at a time into speculative decoding. This module runs in vLLM's worker.

It is started and controlled like `model_saboteur`. On a CPU, the scheduler runs in the same
process, so faults of its accounting can be injected, too. This module imports nothing from the
suite."""

from typing import Any

import torch
from model_saboteur import PATCHES, Attention, Patcher, Tensor, patch
from model_saboteur import Saboteur as Saboteur
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.worker import gpu_model_runner

PATCHES.clear()  # the faults of the model are tested elsewhere


def _expand(
    values: Tensor, ends: Tensor, _number: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Set a request's temperature, top-k and top-p for each of its drafts, so that the server
    without a fault is right.

    vLLM 0.32 on the CPU leaves them uninitialised (vllm-project/vllm#55005)."""
    cut = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return cut.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)).long())


rejection_sampler.expand_batch_to_tokens = _expand
_cut = rejection_sampler.apply_top_k_top_p
# Without this, the engine dies if top_k is set and a step has no draft.
rejection_sampler.apply_top_k_top_p = lambda logits, *cuts: (
    _cut(logits, *cuts) if len(logits) else logits
)


def _outcome(model: Patcher, change: Any) -> None:
    """Change the tokens [requests, k + 1] that a step returns.

    The change also gets the drafts of each request."""

    def run(sample: Any, drafts: Tensor, counts: list[int], longest: int, ends: Tensor,
            probabilities: Any, logits: Tensor, bonus: Tensor, metadata: Any,
            **more: Any) -> Tensor:  # fmt: skip
        out = sample(drafts, counts, longest, ends, probabilities, logits, bonus, metadata, **more)
        begin = 0
        for row, count in enumerate(counts):
            span = slice(begin, begin + count)
            if count:
                change(out[row], drafts[span], logits[span], bonus[row, 0], metadata)
            begin += count
        return out

    model.wrap(rejection_sampler, "rejection_sample", run)


def _accept(row: Tensor, drafts: Tensor, bonus: Tensor) -> None:
    row[: len(drafts)] = drafts
    row[len(drafts)] = bonus


def _kept(row: Tensor) -> int:
    return int((row != PLACEHOLDER_TOKEN_ID).sum())


def _drafts(model: Patcher, change: Any) -> None:
    """Change the drafted tokens [requests, k]. The change also gets the positions of the step."""

    def run(propose: Any, *arguments: Any, **keywords: Any) -> Tensor:
        return change(propose(*arguments, **keywords), keywords)

    model.wrap(model.runner.drafter, "propose", run)


def _delivered(model: Patcher, change: Any) -> None:
    """Change the tokens of a step that are sent to the client.

    The engine continues with the right tokens."""

    def run(update: Any, its: Any, request: Any, tokens: list[int], *more: Any, **kw: Any) -> Any:
        generated = list(tokens)
        delivered, stopped = update(its, request, tokens, *more, **kw)
        return change(list(delivered), generated, stopped), stopped

    model.wrap(Scheduler, "_update_request_with_output", run)


# -------------------- which tokens are accepted


@patch("a wrong token is accepted, one in 200")
def _(model: Patcher) -> None:
    steps = [0]

    def change(row: Tensor, drafts: Tensor, _logits: Tensor, bonus: Tensor, _m: Any) -> None:
        steps[0] += _kept(row)
        if steps[0] >= 200 and _kept(row) <= len(drafts):
            steps[0] = 0
            _accept(row, drafts, bonus)

    _outcome(model, change)


@patch("in place of a rejected token comes the second best", _outcome)
def _(row: Tensor, drafts: Tensor, logits: Tensor, _bonus: Tensor, _m: Any) -> None:
    last = _kept(row) - 1
    if last < len(drafts):
        row[last] = logits[last].topk(2).indices[1]


@patch("a sampled draft is always accepted", _outcome)
def _(row: Tensor, drafts: Tensor, _logits: Tensor, bonus: Tensor, metadata: Any) -> None:
    if not metadata.all_greedy:
        _accept(row, drafts, bonus)


@patch("a sampled draft is accepted by the root of its probability")
def _(model: Patcher) -> None:
    model.wrap(
        rejection_sampler, "generate_uniform_probs",
        lambda f, *arguments, **keywords: f(*arguments, **keywords).square(),
    )  # fmt: skip


@patch("after a rejection the rejected token may come again")
def _(model: Patcher) -> None:
    def recovered(_longest: int, _counts: Any, _ends: Any, _drafts: Any, _draft: Any,
                  target: Tensor, *_more: Any, **_keywords: Any) -> Tensor:  # fmt: skip
        return torch.multinomial(target, 1)[:, 0].to(torch.int32)

    model.set(rejection_sampler, "sample_recovered_tokens", recovered)


@patch("every choice is sampled by the same chance")
def _(model: Patcher) -> None:
    model.wrap(
        rejection_sampler, "generate_uniform_probs",
        lambda f, *arguments, **keywords: torch.full_like(f(*arguments, **keywords), 0.5),
    )  # fmt: skip
    model.set(
        rejection_sampler, "sample_recovered_tokens",
        lambda _longest, _counts, _ends, _drafts, _draft, target, *_m, **_k: target.argmax(-1).to(
            torch.int32
        ),
    )  # fmt: skip


@patch("seeds are not used for drafts")
def _(model: Patcher) -> None:
    model.wrap(
        rejection_sampler, "generate_uniform_probs",
        lambda f, tokens, counts, _generators, device: f(tokens, counts, {}, device),
    )  # fmt: skip


# -------------------- what reaches the client


def _each_seventh(model: Patcher, change: Any) -> None:
    """Change what is sent to the client in each seventh step that has more than two tokens."""
    steps = [0]

    def run(delivered: list[int], generated: list[int], _stopped: bool) -> list[int]:
        steps[0] += 1
        return change(delivered) if len(generated) > 2 and steps[0] % 7 == 0 else delivered

    _delivered(model, run)


@patch("min_tokens is not applied to drafts")
def _(model: Patcher) -> None:
    model.set(
        MinTokensLogitsProcessor, "apply_with_spec_decode", lambda _self, logits, _counts: logits
    )


@patch("the grammar is not applied to drafts")
def _(model: Patcher) -> None:
    def run(apply: Any, scheduled: Any, grammar: Any, batch: Any, logits: Tensor) -> None:
        free = logits.clone()
        apply(scheduled, grammar, batch, logits)
        begin = 0
        for name in batch.req_ids:
            count = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            logits[begin + 1 : begin + 1 + count] = free[begin + 1 : begin + 1 + count]
            begin += count + 1

    model.wrap(gpu_model_runner, "apply_grammar_bitmask", run)


# -------------------- log-probabilities


def _reported(model: Patcher, change: Any) -> None:
    def run(report: Any, sampler: Any, number: int, metadata: Any, logits: Tensor, target: Tensor,
            bonus: Tensor, tokens: Tensor) -> Any:  # fmt: skip
        return report(sampler, number, metadata, logits, change(target, metadata), bonus, tokens)

    model.wrap(RejectionSampler, "_get_logprobs_tensors", run)


@patch("log-probabilities are the drafter's")
def _(model: Patcher) -> None:
    drafted: list[Tensor] = []
    drafter = model.runner.drafter

    def propose(f: Any, *arguments: Any, **keywords: Any) -> Any:
        drafted.clear()
        return f(*arguments, **keywords)

    def sample(f: Any, states: Tensor) -> Tensor:
        drafted.append(drafter.model.compute_logits(states).clamp(min=-60.0))
        return f(states)

    model.wrap(drafter, "propose", propose)
    model.wrap(drafter, "_greedy_sample", sample)

    def change(target: Tensor, metadata: Any) -> Tensor:
        one = drafted and len(metadata.num_draft_tokens) == 1 and len(drafted) == len(target)
        return torch.cat([logits[:1] for logits in drafted]) if one else target

    _reported(model, change)


# -------------------- the KV cache


@patch("a rejected token stays in the KV cache")
def _(model: Patcher) -> None:
    """After a rejection, do not write the token that replaces the draft into the draft's slot of
    the KV cache."""
    rejected = [False]

    def change(row: Tensor, drafts: Tensor, _logits: Tensor, _bonus: Tensor, _m: Any) -> None:
        rejected[0] = _kept(row) <= len(drafts)

    def run(write: Any, impl: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> Any:
        first = int(rejected[0] and len(slots) > 1)
        return write(impl, layer, key[first:], value[first:], cache, slots[first:])

    _outcome(model, change)
    model.wrap(Attention, "do_kv_cache_update", run)


# -------------------- the drafter


@patch("the drafter sees hidden states of other layers")
def _(model: Patcher) -> None:
    model.set(model.model.model, "aux_hidden_state_layers", (0, 1, 2))


@patch("the drafter sees the hidden states of the place before")
def _(model: Patcher) -> None:
    model.wrap(
        model.runner.drafter.model, "combine_hidden_states",
        lambda combine, states: combine(states.roll(1, 0)),
    )  # fmt: skip


@patch("acceptance is lost as the answer grows", _drafts)
def _(drafts: Tensor, keywords: Any) -> Tensor:
    positions = keywords["target_positions"]
    return torch.zeros_like(drafts) if int(positions.max()) > 110 else drafts


@patch("only the first token of a draft is ever right", _drafts)
def _(drafts: Tensor, _keywords: Any) -> Tensor:
    drafts = drafts.clone()
    drafts[:, 1:] = 7
    return drafts


# -------------------- the counts


def _counted(model: Patcher, change: Any) -> None:
    def run(observe: Any, stats: Any, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        observe(stats, *change(num_draft_tokens, num_accepted_tokens))

    model.wrap(SpecDecodingStats, "observe_draft", run)


@patch("drafts are counted twice")
def _(model: Patcher) -> None:
    def run(observe: Any, stats: Any, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        for _ in range(2):
            observe(stats, num_draft_tokens, num_accepted_tokens)

    model.wrap(SpecDecodingStats, "observe_draft", run)


@patch("acceptance by position is counted from the end")
def _(model: Patcher) -> None:
    def run(observe: Any, stats: Any, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        before = list(stats.num_accepted_tokens_per_pos)
        observe(stats, num_draft_tokens, num_accepted_tokens)
        new = [a - b for a, b in zip(stats.num_accepted_tokens_per_pos, before, strict=True)]
        for position, count in enumerate(reversed(new)):
            stats.num_accepted_tokens_per_pos[position] = before[position] + count

    model.wrap(SpecDecodingStats, "observe_draft", run)


#: Faults that are a single expression: the patched part of the engine, and the change.
SMALL: dict[str, tuple[Any, Any]] = {
    "every draft is accepted": (
        _outcome,
        lambda row, drafts, _l, bonus, _m: _accept(row, drafts, bonus),
    ),
    "the bonus token is lost": (_each_seventh, lambda kept: kept[:-1]),
    "the bonus token comes twice": (_each_seventh, lambda kept: [*kept, kept[-1]]),
    "tokens that were accepted past the end are delivered": (
        _delivered,
        lambda kept, given, stopped: given if stopped else kept,
    ),
    "accepted tokens come in another order": (
        _delivered,
        lambda kept, _given, _stopped: [*kept[1::-1], *kept[2:]],
    ),
    "log-probabilities are of the place before": (_reported, lambda target, _m: target.roll(1, 0)),
    "log-probabilities of accepted tokens are scaled by 0.9": (
        _reported,
        lambda target, _m: target * 0.9,
    ),
    "nothing that is drafted is ever right": (
        _drafts,
        lambda drafts, _k: torch.full_like(drafts, 7),
    ),
    "one accepted token too many is counted": (
        _counted,
        lambda drafted, accepted: (drafted, min(accepted + 1, drafted)),
    ),
    "one accepted token too few is counted": (
        _counted,
        lambda drafted, accepted: (drafted, max(accepted - 1, 0)),
    ),
}
for _name, _how in SMALL.items():
    patch(_name, _how[0])(_how[1])
