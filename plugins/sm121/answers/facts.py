"""Whether a server knows a few facts: enough to tell a model from noise."""

from collections.abc import Sequence

from sm121.core.level_settings import KnownAnswer
from sm121.core.server import Endpoint


def unknown(endpoint: Endpoint, facts: Sequence[KnownAnswer]) -> dict[str, str]:
    """The facts that a server does not know: what it said instead, by the prompt."""
    import openai

    wrong = {}
    with endpoint.openai() as client:
        for fact in facts:
            try:
                answer = client.completions.create(
                    model=endpoint.served_name,
                    prompt=fact.prompt,
                    max_tokens=max(4, len(fact.begins)),
                    temperature=0.0,
                )
            except openai.OpenAIError as error:
                wrong[fact.prompt] = f"{type(error).__name__}: {error}"[:200]
                continue
            text = (answer.choices[0].text if answer.choices else "") or ""
            if not text.startswith(fact.begins):
                wrong[fact.prompt] = repr(text[:80])
    return wrong
