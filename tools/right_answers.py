"""Write ``fixtures/answers/right-answers.json``: the right answers to the facts of each exam.

``python -m tools.right_answers`` writes the facts of an exam as one chat, in which each question is
followed by its right answer, as token ids.
"""

import json
from pathlib import Path

from openai_harmony import HarmonyEncodingName, load_harmony_encoding

from sm121.answers import exam

_FILE = Path("fixtures/answers/right-answers.json")
_SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2026-01-15\n\nReasoning: low\n\n# Valid channels: "
    "analysis, commentary, final. Channel must be included for every message.<|end|>"
)
#: An answer in the model's own words to a question of the exam.
ANSWERS = {
    "canary": {
        "capital-of-spain": "The capital of Spain is Madrid.",
        "capital-of-peru": "The capital of Peru is Lima.",
        "capital-of-norway": "The capital of Norway is Oslo.",
        "a-sum": "2 + 3 = 5.",
        "counting": "1, 2, 3, 4, 5",
        "days": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    },
    "gpt-oss-120b": {
        "capital-of-australia": "Canberra",
        "capital-of-kenya": "Nairobi",
        "capital-of-norway": "Oslo",
        "symbol-of-gold": "Au",
        "element-26": "Iron",
        "formula-of-water": "H₂O",
        "gas-of-photosynthesis": "Carbon dioxide",
        "largest-planet": "Jupiter",
        "unit-of-force": "Newton",
        "author-of-hamlet": "William Shakespeare",
        "product": "391",
        "difference": "643",
        "power-of-two": "4096",
        "square-root": "13",
        "remainder": "30",
        "percentage": "36",
        "next-prime": "97",
        "next-of-a-sequence": "162",
        "hexadecimal": "255",
        "binary": "10101",
        "roman-numeral": "44",
        "angles-of-a-triangle": "180",
        "metres": "3500",
        "minutes-of-a-day": "1440",
        "equal-temperatures": "-40",
        "program-sum": "66",
        "program-reverse": "desserts",
        "german-word": "Butterfly",
        "spelling": "receive",
        "shortest-of-three": "Clara",
    },
}


def text(name: str) -> dict[str, object]:
    """Return the chat of an exam, and the positions of each answer's tokens in it.

    Args:
        name: The name of the exam.

    Returns:
        ``token_ids``, and ``answers``: for each question [first token, first token after the last].
    """
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    ids = encoding.encode(_SYSTEM, allowed_special="all")
    places: dict[str, list[int]] = {}
    for question in exam.load(name).section("facts").questions:
        answer = ANSWERS[name][question.id]
        asked = f"<|start|>user<|message|>{question.turns[0].user}<|end|><|start|>assistant"
        ids += encoding.encode(f"{asked}<|channel|>final<|message|>", allowed_special="all")
        begin = len(ids)
        ids += encoding.encode(answer)
        places[question.id] = [begin, len(ids)]
        ids += encoding.encode("<|end|>", allowed_special="all")
    return {"token_ids": ids, "answers": places}


if __name__ == "__main__":
    made = {name: text(name) for name in ANSWERS}
    _FILE.write_text(json.dumps(made) + "\n", "utf-8")
