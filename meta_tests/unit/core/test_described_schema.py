"""The fields of verdict.json and of a profile have descriptions (`sm121.core.described_schema`)."""

import inspect
import tomllib

import pytest

from sm121.core import described_schema
from sm121.core.profile import Profile
from sm121.run.verdict_file import VerdictFile

_MODELS = pytest.mark.parametrize("model", [VerdictFile, Profile])


@_MODELS
def test_each_field_has_a_description(model):
    schema = described_schema.json_schema(model, "serialization")
    parts = {model.__name__: schema, **schema["$defs"]}
    empty = []
    for name, part in parts.items():
        for key, value in part.get("properties", {}).items():
            if not value.get("description"):
                empty.append(f"{name}.{key}")
    assert empty == [], "add a comment `#:` above the field, or a row to field-meanings.toml"


def test_the_file_describes_only_fields_without_a_description_in_the_code():
    needed = {}
    for model in (VerdictFile, Profile):
        for one in described_schema.classes(model):
            for part in one.__mro__:
                own = set(inspect.get_annotations(part))
                needed[part.__name__] = own
                if part.__module__.startswith("sm121."):
                    needed[part.__name__] = own - set(described_schema.in_code(part))
    for name, rows in tomllib.loads(described_schema.FILE.read_text("utf-8")).items():
        assert set(rows) <= needed[name], name


def test_a_comment_above_or_a_docstring_below_describes_a_field():
    found = described_schema.meanings(VerdictFile)
    assert found["question"].startswith("The question that the named configuration")
    assert found["arch"].startswith("The architecture of the target")
    assert described_schema.meanings(Profile)["under_test"] == (
        "The configuration that is tested and measured."
    )
