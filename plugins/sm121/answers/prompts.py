"""The prompt sets that come with the suite, validated when they are loaded."""

import hashlib
from typing import Literal

from pydantic import Field

from sm121.core import data_file
from sm121.core.data_file import DataTable, Entries


class Prompt(DataTable):
    """A text that the model continues."""

    name: str = Field(min_length=1)
    text: str = Field(min_length=1)
    #: The number of tokens of the continuation.
    tokens: int = Field(ge=1)
    #: Whether the model must not repeat itself in the continuation.
    varied: bool = True


class PromptSet(DataTable):
    """Prompts with one correct greedy continuation each."""

    schema_version: Literal[1]
    name: str
    prompts: Entries[Prompt]

    @property
    def sha256(self) -> str:
        """The SHA-256 hash of all fields."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class Questions(DataTable):
    """Questions for a chat."""

    schema_version: Literal[1]
    name: str
    questions: tuple[str, ...] = Field(min_length=1)


def continuations() -> PromptSet:
    """Load ``fixtures/answers/prompts.toml``."""
    return data_file.load("answers/prompts.toml", PromptSet)


def questions() -> Questions:
    """Load ``fixtures/answers/questions.toml``."""
    return data_file.load("answers/questions.toml", Questions)
