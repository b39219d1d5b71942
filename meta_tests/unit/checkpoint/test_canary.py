"""The canary: its BF16 and MXFP4 checkpoints agree, its answers and the oracle are right, and
defects are detected."""

import hashlib
import json
import re
import shutil
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from meta_tests.texts import text_file

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from sm121.answers import oracle_file, oracle_making, oracle_texts  # noqa: E402
from sm121.checkpoint import canary, tokenizer  # noqa: E402
from sm121.oracles import gpt_oss, mxfp4  # noqa: E402
from sm121.oracles.formats import EXACT  # noqa: E402
from tools import ablation, small_oracle  # noqa: E402
from tools.canary import batches, corpus, recipe  # noqa: E402

RETURN = 200_002
CALL = 200_012
STOP = frozenset({RETURN, CALL, 199_999})
SHIPPED = resources.files("sm121.fixtures") / "canary"


@pytest.fixture(scope="module")
def encoder() -> batches.Encoder:
    pytest.importorskip("openai_harmony")
    return batches.Encoder()


@pytest.fixture(scope="module")
def weights(canary_mxfp4: Path) -> gpt_oss.Weights:
    torch.set_num_threads(1)
    return small_oracle.load(canary_mxfp4)


# The number format.


def test_every_code_and_scale_decodes_to_its_definition():
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = magnitudes + [-value for value in magnitudes]
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for scale in range(255):
        decoded = mxfp4.dequantise(packed, np.full((16, 1), scale, dtype=np.uint8)).reshape(-1, 2)
        factor = 2.0 ** (scale - 127)
        assert decoded[:, 0].tolist() == [values[byte & 15] * factor for byte in range(256)]
        assert decoded[:, 1].tolist() == [values[byte >> 4] * factor for byte in range(256)]
    assert np.isnan(mxfp4.dequantise(packed, np.full((16, 1), 255, dtype=np.uint8))).all()
    assert (mxfp4.pack(mxfp4.unpack(packed)) == packed).all()


@pytest.mark.parametrize("rule", mxfp4.ScaleRule)
def test_quantising_what_is_representable_changes_nothing(rule):
    generator = np.random.default_rng(0)
    packed = generator.integers(0, 256, (64, 64), dtype=np.uint8)
    scales = generator.integers(100, 150, (64, 4), dtype=np.uint8)
    values = mxfp4.dequantise(packed, scales)
    same = (mxfp4.dequantise(*recipe.quantise(values, rule)) == values).all()
    # Rounding log2 gives amax 6 twice the scale, which cannot represent 0.5 and 1.5.
    assert same == (rule is not mxfp4.ScaleRule.ROUND_LOG2)


def test_elements_round_to_nearest_even():
    values = np.array([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 9.0, -0.75])
    assert mxfp4.encode_elements(values).tolist() == [0, 1, 2, 2, 4, 4, 6, 6, 7, 7, 10]


# The checkpoint.


def test_shipped_weights_are_small():
    sizes = {"weights.safetensors": 8, "drafter.safetensors": 3}
    sizes |= {file.name: 1 for file in SHIPPED.glob("oracle*.json")}
    for name, most in sizes.items():
        assert len((SHIPPED / name).read_bytes()) <= most * 1_000_000, name


def test_the_drafter_is_of_the_canary_that_is_shipped(canary_bf16):
    """The drafter was trained on the shipped weights, and its tokens are mapped to theirs."""
    trained = json.loads((SHIPPED / "drafter.json").read_text("utf-8"))
    recorded = json.loads((SHIPPED / "weights.json").read_text("utf-8"))
    weights = hashlib.sha256((SHIPPED / "weights.safetensors").read_bytes()).hexdigest()
    assert trained["canary_sha256"] == recorded["sha256"] == weights
    for where in ("accepted_of_documents", "accepted_of_answers"):
        assert sum(trained[where][:2]) >= 1.5, where
    tensors = safetensors_torch.load_file(canary_bf16 / "eagle3" / "model.safetensors")
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()


def test_twins_hold_the_same_values(canary_mxfp4, canary_bf16):
    packed = safetensors_torch.load_file(canary_mxfp4 / "model.safetensors")
    plain = safetensors_torch.load_file(canary_bf16 / "model.safetensors")
    for name, tensor in plain.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = (packed.pop(f"{name}_{part}").numpy() for part in ("blocks", "scales"))
            values = mxfp4.dequantise(blocks.reshape(*blocks.shape[:-2], -1), scales)
            assert np.array_equal(values.swapaxes(1, 2), tensor.double().numpy()), name
        else:
            assert torch.equal(packed.pop(name), tensor), name
    assert not packed


def test_unknown_tokens_have_rows_of_their_own(canary_bf16):
    tensors = safetensors_torch.load_file(canary_bf16 / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    assert len({row.numpy().tobytes() for row in rows[::97].view(torch.int16)}) == len(rows[::97])


def test_a_second_build_is_left_alone(canary_bf16):
    before = (canary_bf16 / "model.safetensors").stat().st_mtime_ns
    assert canary.build(canary_bf16, "bf16", progress=lambda _: None) == canary_bf16
    assert (canary_bf16 / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow("a minute of computing on a busy machine; the canary does not change")
def test_every_build_is_the_same(canary_bf16, tmp_path):
    def files(folder: Path) -> list[str]:
        return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())

    again = canary.build(tmp_path / "again", "bf16", progress=lambda _: None)
    names = files(canary_bf16)
    assert "eagle3/model.safetensors" in names and files(again) == names
    for name in names:
        assert (again / name).read_bytes() == (canary_bf16 / name).read_bytes(), name


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match="not a canary"):
        canary.build(tmp_path, "bf16", progress=lambda _: None)


def test_tokenizer_encodes_like_harmony(canary_bf16, encoder):
    tokenizers = pytest.importorskip("tokenizers")
    built = tokenizers.Tokenizer.from_file(str(canary_bf16 / "tokenizer.json"))
    for text in (
        *(
            "The capital of France is Paris.",
            ("I'm sure you're RIGHT,  they'LL see;\n\n\t x = 3.14159 // done\r\n"),
            "日本語 한국어 Русский العربية Ünïcödé Ǆungla ª 😀👩\u200d👩\u200d👧",
            (
                "<|start|>assistant<|channel|>commentary to=functions.get_weather "
                '<|constrain|>json<|message|>{"a": 1}<|call|>'
            ),
            "<|startoftext|>1234567890<|endoftext|><|return|><|end|>",
        ),
        Path(__file__).read_text("utf-8"),
    ):
        ids = encoder.encode(text)
        assert built.encode(text, add_special_tokens=False).ids == ids
        assert built.decode(ids, skip_special_tokens=False) == text
    assert built.get_vocab_size() == tokenizer.VOCABULARY


# The oracle.


@pytest.mark.slow("a minute of computing on a busy machine; the canary does not change")
def test_oracle_agrees_with_transformers(canary_bf16):
    """The oracle agrees with transformers. The same holds for the shipped file of the oracle."""
    shipped = oracle_file.shipped(canary_bf16)
    assert shipped is not None, "it is of another canary: `sm121 golden`"
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        canary_bf16, dtype=torch.float32, attn_implementation="eager"
    )
    weights = small_oracle.load(canary_bf16, torch.float64)
    for prompt in ablation.load_prompts()[:7]:
        ids = torch.tensor(prompt.token_ids)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        # In float32, a softmax over this large vocabulary alone has an error of up to 4e-4.
        expected = logits.double().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        computed = small_oracle.next_token_log_probabilities(weights, prompt.token_ids)
        assert (computed - expected).abs().max() < 1e-4, prompt.name
        stored = torch.tensor(shipped.prompts[prompt.name].following)
        assert (computed - stored).abs().max() < 1e-4, prompt.name


@pytest.mark.slow("two cores compute for a minute")
def test_the_whole_of_what_is_shipped_is_made_again(canary_bf16):
    unlike = {"suite": "", "made": "", "seconds": 0.0}
    shipped, made = (
        re.findall(r"-?[\d.]+(?:e-\d+)?", file.model_copy(update=unlike).model_dump_json())
        for file in (oracle_file.shipped(canary_bf16), oracle_making.make(canary_bf16))
    )
    assert np.allclose([*map(float, shipped)], [*map(float, made)], rtol=0, atol=1e-6)


def test_only_the_canary_has_what_is_shipped(canary_mxfp4, canary_bf16, tmp_path, monkeypatch):
    """The oracle's shipped file is not used for the other checkpoint of the canary, for other
    weights, for a certificate or for other prompts."""
    made = oracle_file.shipped(canary_bf16).model_copy(update={"suite": "made anew"})
    monkeypatch.setattr(oracle_making, "make", lambda *_a, **_k: made)
    changed = Path(shutil.copytree(canary_bf16, tmp_path / "changed"))
    weights = changed / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    for checkpoint, anew in ((canary_mxfp4, False), (changed, False), (canary_bf16, True)):
        assert oracle_making.kept_or_made(checkpoint, EXACT, tmp_path / "kept", anew=anew) == made
    assert oracle_making.kept_or_made(canary_bf16, EXACT, tmp_path / "kept") != made
    monkeypatch.setattr(oracle_texts, "GENERATED", 3)
    assert oracle_making.kept_or_made(canary_bf16, EXACT, tmp_path / "others") == made


def test_log_probabilities_of_all_tokens_and_of_the_next_agree(weights):
    ids = ablation.load_prompts()[0].token_ids[:12]
    every = small_oracle.log_probabilities(weights, ids)
    total = every.double().exp().sum(-1)
    assert total.sub(1).abs().max() < 1e-4, total
    following = every[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    expected = small_oracle.next_token_log_probabilities(weights, ids)
    assert torch.allclose(following, expected, atol=1e-4)


def test_a_token_does_not_see_the_future(weights):
    ids = list(ablation.load_prompts()[-1].token_ids[:200])
    whole = small_oracle.hidden_states(weights, ids)
    assert torch.allclose(whole[:150], small_oracle.hidden_states(weights, ids[:150]), atol=1e-4)


# The canary's answers.


CAPITALS = corpus.load_corpus()["capitals"]


@pytest.mark.parametrize("country", [*CAPITALS][::2])
def test_knows_capitals(weights, encoder, country):
    ids = encoder.encode(f"The capital of {country} is")
    expected = encoder.encode(f" {CAPITALS[country]}.")
    assert _greedy(weights, ids, len(expected)) == expected


def _greedy(
    weights: gpt_oss.Weights, token_ids: list[int], count: int, stop: frozenset[int] = frozenset()
) -> list[int]:
    """Return at most `count` greedy tokens, or fewer if a stop token ends them."""
    ids = list(token_ids)
    for _ in range(count):
        last = small_oracle.hidden_states(weights, ids)[-1]
        ids.append(int((weights.head @ last.to(weights.head.dtype)).argmax()))
        if ids[-1] in stop:
            break
    return ids[len(token_ids) :]


def _chat(user: str, tools: str = "", effort: str = "medium") -> str:
    calls = "\nCalls to these tools must go to the commentary channel: 'functions'."
    return text_file("chat.txt").format(
        effort=effort, calls=calls if tools else "", tools=tools, user=user
    )


_WEATHER = text_file("weather-tool.txt")


def test_chats_are_rendered_as_harmony_renders_them(encoder):
    harmony = pytest.importorskip("openai_harmony")
    system = (
        harmony.SystemContent.new()
        .with_reasoning_effort(harmony.ReasoningEffort.LOW)
        .with_conversation_start_date("2026-11-20")
    )
    city = {"type": "object", "properties": {"city": {"type": "string", "description": "The city"}}}
    parameters = {**city, "required": ["city"]}
    weather = harmony.ToolDescription.new("get_weather", "Get the weather", parameters=parameters)
    contents = {
        harmony.Role.SYSTEM: system,
        harmony.Role.DEVELOPER: harmony.DeveloperContent.new().with_function_tools([weather]),
        harmony.Role.USER: "How cold is it?",
    }
    messages = [harmony.Message.from_role_and_content(*each) for each in contents.items()]
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    conversation = harmony.Conversation.from_messages(messages)
    rendered = encoding.render_conversation_for_completion(conversation, harmony.Role.ASSISTANT)
    assert encoder.encode(_chat("How cold is it?", _WEATHER, effort="low")) == rendered


@pytest.mark.parametrize(
    "effort", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("medium", "high")), "low"]
)
def test_chat_thinks_and_then_answers(weights, encoder, effort):
    ids = encoder.encode(_chat("What is the capital of France?", effort=effort))
    answer = _greedy(weights, ids, 60, STOP)
    analysis = encoder.encode("<|channel|>analysis<|message|>")
    sentence = "<|channel|>final<|message|>The capital of France is Paris.<|return|>"
    final = encoder.encode(f"<|start|>assistant{sentence}")
    assert answer[: len(analysis)] == analysis and answer[-len(final) :] == final


@pytest.mark.parametrize(
    "city",
    ["Paris", *(pytest.param(c, marks=pytest.mark.slow) for c in ("Tokyo", "San Francisco"))],
)
def test_chat_calls_a_tool(weights, encoder, city):
    ids = encoder.encode(_chat(f"What is the weather in {city}?", _WEATHER))
    answer = _greedy(weights, ids, 60, STOP)
    call = encoder.encode(
        "<|start|>assistant<|channel|>commentary to=functions.get_weather "
        f'<|constrain|>json<|message|>{{"city": "{city}"}}<|call|>'
    )
    assert answer[-len(call) :] == call


# The detected defects.


@pytest.mark.slow("the whole of docs/tables/ablation.md")
def test_every_defect_shows_ten_times_above_the_tolerance(canary_mxfp4):
    torch.set_num_threads(1)
    names = ("tool call", "mixture of 300")
    chosen = [prompt for prompt in ablation.load_prompts() if prompt.name in names]
    rows = ablation.measure(canary_mxfp4, chosen)
    assert {row.feature for row in rows} == set(ablation.ABLATIONS)
    weak = {row.feature: row.max for row in rows if not row.max >= 10 * ablation.TOLERANCE}
    assert not weak


def test_prompts_cross_the_window():
    lengths = {len(prompt.token_ids) for prompt in ablation.load_prompts()}
    assert {127, 128, 129, 300, 600} <= lengths
