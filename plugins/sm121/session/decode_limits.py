"""The limits of `sm121 profile`: of times, of lengths, and those that the memory sets."""

from collections.abc import Sequence

from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.core.profile_fields import Gate
from sm121.evidence import decode_parts
from sm121.evidence.decode_time import DecodeTime, Judgement, Limits
from sm121.evidence.kernel_profile import KernelProfile
from sm121.evidence.profiler import LONGEST_ANSWER, SETTLING_TOKENS
from sm121.measure import rate_name

#: Tokens in addition to the timed and the profiled ones, because some are generated before the
#: profiler has started.
_FEWEST_SPARE = 32
#: A measured time may be shorter than the one that the memory allows by this share: the bandwidth
#: is that of healthy machines, and one may be faster.
_FASTER = 0.05
#: The layers of a step may differ from those of the model by this share, because a trace may begin
#: or end within a step.
_OTHER_LAYERS = 0.1


def limits_of(profile: Profile, prompt: int | None) -> Limits:
    """Return the time limits of a decode after a prompt.

    Each limit is a gate of the profile if it has one, otherwise the limit of the SM121 testing
    guide (`docs/from-the-plan.md`).

    The gate ``tpot_p50`` and the guide's time of a token are for a prompt of the profile's own
    length. After a longer prompt, the gate on the rate at the next depth applies. If no gate on a
    rate is that deep, the time of a token has no limit, and `Limits.source` gives the reason.

    Args:
        profile: The profile. If it is resolved for a configuration (`Profile.judging`), the
            configuration's gates apply.
        prompt: Tokens of the prompt; None: unknown.
    """
    guide = decode_parts.load().gates
    sizes = profile.performance
    of = f"profile {profile.name}"
    if profile.question is not None:
        of = f"configuration {profile.question}"
    token_ms: float | None = guide.token_ms
    source = "guide"
    if prompt is None or prompt <= sizes.prompt_tokens:
        gate = profile.gate("tpot_p50")
        if gate is not None and gate.at_most is not None:
            token_ms = gate.at_most
            source = f"gate tpot_p50 of {of}"
    else:
        rate = _gate_at_depth(profile, prompt - sizes.prompt_tokens)
        if rate is not None and rate.minimum is not None:
            token_ms = 1e3 / rate.minimum
            source = f"gate {rate.metric} of {of}, as a time"
        elif any(_is_decode_rate(gate.metric) for gate in sizes.gates):
            token_ms = None
            source = (
                f"{of}: expected a gate on a rate after a prompt of {prompt} tokens, got none. "
                "Give a shorter --prompt"
            )
    moe_ms: float | None = guide.moe_ms
    of_experts = profile.gate("moe_decode_us")
    if profile.model.dense:
        moe_ms = None
    elif of_experts is not None and of_experts.at_most is not None:
        moe_ms = of_experts.at_most / 1e3
    return Limits(token_ms, source, moe_ms)


def _is_decode_rate(metric: str) -> bool:
    rate = rate_name.rate(metric)
    return rate is not None and rate.decoding


def _gate_at_depth(profile: Profile, depth: int) -> Gate | None:
    """Return the gate on the decode rate at a depth, for the shortest answers that have a gate.

    If the depth has no such gate, the gate at the next larger depth is returned.
    """
    lengths = sorted(profile.performance.generated_tokens)
    for deep in sorted(profile.performance.depths):
        for length in lengths:
            gate = profile.gate(f"tg{length}@d{deep}")
            if deep >= depth and gate is not None:
                return gate
    return None


def longest_answer(prompt: int, tokens: int, context: int | None) -> int:
    """Return the largest number of tokens that the profiled answer may have.

    Args:
        prompt: Tokens of the prompt.
        tokens: The fewest decode steps that are profiled.
        context: The server's context, in tokens; None: unknown.

    Raises:
        UsageError: An answer behind the prompt is too short to time and to profile its steps.
    """
    needed = SETTLING_TOKENS + 2 * tokens + _FEWEST_SPARE
    if needed > LONGEST_ANSWER:
        most = (LONGEST_ANSWER - SETTLING_TOKENS - _FEWEST_SPARE) // 2
        raise UsageError(f"--tokens {tokens}: expected at most {most}")
    if context is None:
        return LONGEST_ANSWER
    if prompt + needed > context:
        raise UsageError(
            f"--prompt {prompt} --tokens {tokens}: expected a context of at least "
            f"{prompt + needed} tokens, got {context}. Give a shorter --prompt"
        )
    return min(LONGEST_ANSWER, context - prompt)


def judge_drafts(
    judgement: Judgement, profile: KernelProfile, time: DecodeTime, required: Sequence[str]
) -> None:
    """Judge whether a required drafter drafted tokens in the profiled steps.

    Drafts from n-grams are not judged, because a text may have no repeated n-grams.

    Args:
        judgement: The judgement to which the result is added.
        profile: The profiled steps.
        time: The times of the steps, with the tokens that the server's counters show.
        required: The accepted methods of speculative decoding; empty: not known.
    """
    if not required or {"none", "ngram"} & set(required):
        return
    expected = f"speculative decoding: expected steps with drafts of {' or '.join(required)}"
    if profile.step_tokens == 1:
        judgement.faults.insert(
            0,
            f"{expected}, got steps of one token. sm121 path LOG shows whether the server loaded "
            "the drafter",
        )
        return
    has_accepted = time.tokens_per_step is not None and time.tokens_per_step > 1.0
    if profile.step_tokens is None and not has_accepted:
        judgement.not_run.append(
            f"{expected}, but neither the trace nor the server's /metrics show how many tokens a "
            "step computes. Profile a running server or a start of a vLLM whose trace names the "
            "tokens of a step: execute_context_0(0)_generation_1(4)"
        )


def of_another_model(profile: KernelProfile, layers: int | None, model: str) -> list[str]:
    """Return a fault if the steps have another number of layers with experts than the model.

    A layer may launch the experts' products more than once in a step.

    Args:
        profile: The profiled steps.
        layers: The layers of the model, each of which has experts; None: not known.
        model: The model.
    """
    if layers is None or profile.products is None or not profile.steps:
        return []
    found = profile.products.pairs / profile.steps
    times = max(round(found / layers), 1)
    if abs(found - times * layers) <= _OTHER_LAYERS * layers:
        return []
    return [
        f"model: expected a decode step of {model}, with experts in {layers} layers, got "
        f"{found:.3g}. Name the profile of the model with --profile"
    ]


def faster_than_memory(
    time: DecodeTime, bound_ms: float | None, moe_bound_ms: float | None
) -> list[str]:
    """Return a line for each time that is shorter than the memory allows.

    Args:
        time: The times of the steps.
        bound_ms: The shortest time of a step; None: unknown.
        moe_bound_ms: The shortest time of the experts of one layer; None: unknown.
    """
    lines = []
    for name, took, least in (
        ("a step", time.step_ms, bound_ms),
        ("MoE GEMM of a layer", time.moe_layer_ms, moe_bound_ms),
    ):
        if took is not None and least is not None and took < least * (1.0 - _FASTER):
            lines.append(
                f"{name}: expected at least {least:.3g} ms, which the memory allows, got "
                f"{took:.3g} ms. Check that this is a decode of the model of --profile, in the "
                "formats of the configuration"
            )
    return lines
