"""The weights of a checkpoint: for each module, its tensors with their format and part."""

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sm121.checkpoint import weight_tables
from sm121.checkpoint.safetensors_header import Tensor
from sm121.checkpoint.weight_tables import FormatRow, PartRow

#: The number of a layer in the name of a module.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
#: The number of an expert in the name of a module.
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
#: The name of the group with all weights of a drafter.
DRAFT = "draft"
#: The number of bits of an element that contains several packed integers.
_PACKED_BITS = 32
#: The numbers of packed integers in an element, for 4 and 8 bits.
_USUAL_PACKINGS = (8, 4)


@dataclass(frozen=True)
class Weight:
    """The tensors of a module."""

    #: The name of the module, for example model.layers.0.self_attn.q_proj.
    module: str
    part: PartRow
    #: Whether the module belongs to a drafter (multi-token prediction), which is used only for
    #: speculative decoding.
    drafts: bool
    #: The number of the layer; None if the module belongs to no layer.
    layer: int | None
    #: The number of the expert; None if the module belongs to no expert, or to all experts of a
    #: layer.
    expert: int | None
    #: The name in formats.toml; None if the weight is not a matrix (a norm, a bias).
    format: str | None
    #: False for a matrix whose format checkpoint.toml does not describe.
    is_described: bool
    #: Whether the weight has scales in a form that checkpoint.toml describes.
    has_scale: bool
    #: The number of values per scale; None if the values are not packed, or have no scale.
    group_size: int | None
    #: The number of inputs of the matrix, and the number of scales along them. Both are None in the
    #: cases in which the group size is None.
    inputs: int | None
    input_scales: int | None
    #: The tensor with the values, without scales and zero points.
    main: Tensor
    #: The number of the weight's values, if it is known.
    values: int
    #: The size of all tensors of the module, in bytes.
    size: int

    @property
    def group(self) -> str:
        """The name of the part in reports."""
        return DRAFT if self.drafts else self.part.id


def of_tensors(
    tensors: Iterable[Tensor], layers: int | None = None, group_size: int | None = None
) -> list[Weight]:
    """Group tensors into weights.

    Args:
        tensors: All tensors of a checkpoint.
        layers: The number of layers in the model's config.json. Further layers are a drafter's.
        group_size: The number of values per scale, from the label. It is needed to derive the bits
            of packed integers without zero points.
    """
    by_module: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        module, end = _split(tensor.name)
        by_module.setdefault(module, {})[end] = tensor
    return [_weight(module, own, layers, group_size) for module, own in by_module.items()]


def _split(name: str) -> tuple[str, str]:
    """Split the name of a tensor into the name of its module and a suffix."""
    for end in weight_tables.load().names.ends:
        if name.endswith(end):
            return name.removesuffix(end), end
    return name, ""


def _weight(
    module: str, own: Mapping[str, Tensor], layers: int | None, group_size: int | None
) -> Weight:
    numbered = _LAYER.search(module)
    layer = int(numbered[1]) if numbered is not None else None
    expert = _EXPERT.search(f"{module}.")
    names = weight_tables.load().names
    is_behind = layers is not None and layer is not None and layer >= layers
    part = _part_of(role(module))
    drafts = names.draft.search(module) is not None
    if is_behind and part.read != "nothing":
        drafts = True
    main = max(own.values(), key=lambda tensor: tensor.size)
    kind: str | None = None
    is_described = True
    values = main.elements
    values_per_scale: int | None = None
    inputs: int | None = None
    input_scales: int | None = None
    row = _row_of(own)
    if row is not None:
        main = own[row.weight]
        packed = row.values or _packing(row, own, group_size)
        kind = row.id if row.values else f"{row.id}{_PACKED_BITS // packed}"
        values = main.elements * packed
        scale = own[row.scale]
        if packed > 1 and scale.elements:
            values_per_scale = round(values / scale.elements)
            input_scales = _length(scale, row.inputs_dimension)
            inputs = values * input_scales // scale.elements
    elif len(main.shape) > 1 and names.no_matrix.search(module) is None:
        kind = weight_tables.load().plain.get(main.dtype)
        if kind is None:
            is_described = False
            kind = f"unknown ({main.dtype})"
    return Weight(
        module=module,
        part=part,
        drafts=drafts,
        layer=layer,
        expert=int(expert[1]) if expert is not None else None,
        format=kind,
        is_described=is_described,
        has_scale=row is not None,
        group_size=values_per_scale,
        inputs=inputs,
        input_scales=input_scales,
        main=main,
        values=values,
        size=sum(tensor.size for tensor in own.values()),
    )


def _row_of(own: Mapping[str, Tensor]) -> FormatRow | None:
    """Return the row that describes a module's tensors; None if they match no row."""
    for row in weight_tables.load().format:
        weight, scale = own.get(row.weight), own.get(row.scale)
        if weight is None or scale is None:
            continue
        if weight.dtype in row.dtypes and scale.dtype in row.scale_dtypes:
            return row
    return None


def _packing(row: FormatRow, own: Mapping[str, Tensor], group_size: int | None) -> int:
    """Return the number of values in an element of packed integers.

    It is derived from the zero points: each scale has one, and the zero points are packed like the
    weight. Without zero points, it is derived from the declared number of values per scale.
    """
    scale = own[row.scale]
    zeros = own.get(row.zeros or "")
    if zeros is not None and zeros.elements:
        return max(1, round(scale.elements / zeros.elements))
    if group_size:
        words = _length(own[row.weight], row.inputs_dimension)
        scales = _length(scale, row.inputs_dimension)
        for packed in _USUAL_PACKINGS:
            if math.ceil(words * packed / group_size) == scales:  # the last group may be smaller
                return packed
        return max(1, round(scale.elements * group_size / own[row.weight].elements))
    return _USUAL_PACKINGS[0]


def _length(tensor: Tensor, dimension: int) -> int:
    """Return the length of a dimension, which is counted from the end; 1 if it does not exist."""
    return tensor.shape[dimension] if len(tensor.shape) >= -dimension else 1


def role(module: str) -> str:
    """Return the name of a module without the numbers of its layer and expert.

    Args:
        module: The name.
    """
    return re.sub(r"\.\d+(?=\.)", ".*", module)


@functools.cache
def _part_of(role: str) -> PartRow:
    for part in weight_tables.load().part:
        if part.pattern.search(role):
            return part
    raise AssertionError(f"no part for {role}")


def stored_experts(weights: Sequence[Weight]) -> int | None:
    """Return the number of experts in a layer, from the tensors; None: the model has no experts.

    If layers have different numbers of experts, the smallest counts.

    Args:
        weights: All weights.
    """
    experts = [weight for weight in weights if weight.group == "experts"]
    if not experts:
        return None
    by_layer: dict[int | None, set[int]] = {}
    for weight in experts:
        if weight.expert is not None:
            by_layer.setdefault(weight.layer, set()).add(weight.expert)
    if by_layer:
        return min(len(numbers) for numbers in by_layer.values())
    return max(weight.main.shape[0] for weight in experts)


def layers_text(numbers: Iterable[int | None]) -> str:
    """Return the numbers of layers in words: ``layers 0 to 2, 5`` or ``layer 61``.

    Args:
        numbers: The numbers. None stands for weights that belong to no layer, and is ignored.
    """
    known = sorted({number for number in numbers if number is not None})
    if not known:
        return ""
    ranges: list[list[int]] = []
    for number in known:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [f"{low}" if low == high else f"{low} to {high}" for low, high in ranges]
    word = "layer" if len(known) == 1 else "layers"
    return f"{word} {', '.join(texts)}"
