"""Harmony in token ids, and in the server's log."""

import pytest

from sm121.api import harmony

# <|channel|> analysis <|message|> x <|end|> <|start|> assistant <|channel|> final <|message|> y
GOOD = [200005, 35644, 200008, 976, 200007, 200006, 173781, 200005, 17196, 200008, 976, 200002]
TO_A_TOOL = [*GOOD[:8], 12606, 815, 316, 28, 44580, 200003, 4108, 200008, 7, 200012]


@pytest.mark.parametrize("ids", [GOOD, TO_A_TOOL])
def test_good_answers_are_harmony(ids):
    assert harmony.violations(ids, finished=True) == []
    for length in range(1, len(ids)):
        lines = harmony.violations(ids[:length], finished=False)
        assert not [line for line in lines if line != "no message was begun"], (length, lines)


# Each row but the first and the last is GOOD with a token added, removed or changed.
@pytest.mark.parametrize(
    ("ids", "fault"),
    [
        pytest.param((), "no token", id="no token"),
        # Marlin on SM121 loses the first token (vllm#37030)
        pytest.param(
            (35644, 200008, 976, 200007, 200006, 173781, 200005, 17196, 200008, 976, 200002),
            "the first token is 35644",
            id="35644 200008 976 200007 200006 173781 200005 17196",
        ),
        pytest.param(
            (
                220,
                200005,
                35644,
                200008,
                976,
                200007,
                200006,
                173781,
                200005,
                17196,
                200008,
                976,
                200002,
            ),
            "the first token is 220",
            id="220 200005 35644 200008 976 200007 200006 173781 200005",
        ),
        pytest.param(
            (200005, 35644, 200008, 976, 200007, 200006, 173781, 200005, 17196, 200008, 976),
            "ended inside a message",
            id="200005 35644 200008 976 200007 200006 173781 200005",
        ),
        pytest.param(
            (
                200005,
                35644,
                200008,
                200008,
                976,
                200007,
                200006,
                173781,
                200005,
                17196,
                200008,
                976,
                200002,
            ),
            "inside a message",
            id="200005 35644 200008 200008 976 200007 200006 173781",
        ),
        pytest.param(
            (
                200005,
                35644,
                200008,
                976,
                200006,
                200006,
                173781,
                200005,
                17196,
                200008,
                976,
                200002,
            ),
            "inside a message",
            id="200005 35644 200008 976 200006 200006 173781 200005",
        ),
        pytest.param(
            (200005, 35644, 976, 200007, 200006, 173781, 200005, 17196, 200008, 976, 200002),
            "was not begun",
            id="200005 35644 976 200007 200006 173781 200005 17196",
        ),
        pytest.param(
            (
                200005,
                35644,
                200008,
                976,
                200007,
                200006,
                173781,
                200005,
                17196,
                200008,
                976,
                200002,
                976,
            ),
            "1 tokens after the end",
            id="200005 35644 200008 976 200007 200006 173781 200005 (2)",
        ),
        pytest.param(
            (
                200005,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
                35644,
            ),
            "no <|message|> within",
            id="200005 35644 35644 35644 35644 35644 35644 35644 35644",
        ),
    ],
)
def test_broken_answers_are_noticed(ids, fault):
    assert fault in "; ".join(harmony.violations(ids, finished=True))


@pytest.mark.parametrize("text", [*harmony.SPECIAL_TEXTS, "<|reserved_200013|>", "<|endofprompt|>"])
def test_special_tokens_are_seen_in_a_text(text):
    assert harmony.leaked(f"Paris{text}") == [text]
    assert not harmony.leaked("a < b | c > d, <|reserved|> a <| b |>") and not harmony.leaked(None)


def test_a_harmony_error_in_the_log_is_found(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        "INFO harmony is fine\n"
        "ERROR openai_harmony.HarmonyError: Unexpected token 12606 while expecting start token\n"
    )
    (line,) = harmony.errors_in(log)
    assert "12606" in line
