"""The tool that trains the small models makes the shipped tokenizers and architectures."""

import json

import pytest

from meta_tests.releases import needs_torch
from sm121.checkpoint import inspection
from tools import small_models

pytestmark = needs_torch


@pytest.mark.parametrize("family", [*small_models.SPECIAL])
def test_the_shipped_checkpoints_are_of_this_tool(family):
    """Only the training itself is not repeated here, because it takes minutes."""
    shipped = small_models.SHIPPED / family
    tokenizer = small_models.make_tokenizer(family)
    written = json.loads((shipped / "tokenizer.json").read_text("utf-8"))
    assert json.loads(tokenizer.backend_tokenizer.to_str()) == written
    model = small_models.make_model(family, tokenizer, seed=1)
    stored = inspection.inspect(str(shipped)).stored.tensors
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {tensor.name: tensor.shape for tensor in stored} == shapes
