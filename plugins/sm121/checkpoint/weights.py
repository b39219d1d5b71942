"""The weights of a checkpoint: the tensors of one module together, with their format and part."""

import functools
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
#: The part of all weights of a drafter.
DRAFT = "draft"
#: The beginning of the format of a weight whose tensors no row describes.
UNKNOWN = "unknown"
#: The bits of an element that packs integers.
_PACKED_BITS = 32


@dataclass(frozen=True)
class Weight:
    """The tensors of a module."""

    #: The name without its end: model.layers.0.self_attn.q_proj.
    module: str
    part: PartRow
    #: Whether it belongs to a drafter (multi-token prediction), which only speculation reads.
    drafts: bool
    #: None: it belongs to no layer.
    layer: int | None
    #: The number of an expert that is stored alone.
    expert: int | None
    #: As formats.toml names it; None: it has no matrix (a norm, a bias).
    format: str | None
    #: The tensor with its values.
    main: Tensor
    #: How many values it has, as far as that is known.
    values: int
    #: The bytes of all its tensors.
    size: int

    @property
    def group(self) -> str:
        """The part that people are shown."""
        return DRAFT if self.drafts else self.part.id


def of_tensors(
    tensors: Iterable[Tensor], layers: int | None = None, group_size: int | None = None
) -> list[Weight]:
    """Join tensors to weights.

    Args:
        tensors: All tensors of a checkpoint.
        layers: The layers of the model by its config.json; a layer behind them drafts.
        group_size: The values of a scale by the label, where no zero points tell the packing.
    """
    by_module: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        module, end = _split(tensor.name)
        by_module.setdefault(module, {})[end] = tensor
    return [_weight(module, own, layers, group_size) for module, own in by_module.items()]


def _split(name: str) -> tuple[str, str]:
    """Return the module of a tensor, and the end of its name."""
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
    values = main.elements
    row = _row_of(own)
    if row is not None:
        main = own[row.weight]
        packed = row.values or _packing(row, own, group_size)
        kind = row.id if row.values else f"{row.id}{_PACKED_BITS // packed}"
        values = main.elements * packed
    elif len(main.shape) > 1 and names.no_matrix.search(module) is None:
        kind = weight_tables.load().plain.get(main.dtype, f"{UNKNOWN} ({main.dtype})")
    return Weight(
        module=module,
        part=part,
        drafts=drafts,
        layer=layer,
        expert=int(expert[1]) if expert is not None else None,
        format=kind,
        main=main,
        values=values,
        size=sum(tensor.size for tensor in own.values()),
    )


def _row_of(own: Mapping[str, Tensor]) -> FormatRow | None:
    """Return the format that the tensors of a module have; None: they have no scale."""
    for row in weight_tables.load().format:
        weight, scale = own.get(row.weight), own.get(row.scale)
        if weight is None or scale is None:
            continue
        if weight.dtype in row.dtypes and scale.dtype in row.scale_dtypes:
            return row
    return None


def _packing(row: FormatRow, own: Mapping[str, Tensor], group_size: int | None) -> int:
    """Return how many values an element of packed integers has.

    A scale has a zero point, which is packed as the weight is. Without zero points the label has
    the number of values of a scale.
    """
    scale = own[row.scale]
    zeros = own.get(row.zeros or "")
    if zeros is not None and zeros.elements:
        return max(1, round(scale.elements / zeros.elements))
    if group_size:
        return max(1, round(scale.elements * group_size / own[row.weight].elements))
    return _PACKED_BITS // 4


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
    """Return how many experts a layer has by its tensors; None: the model has none.

    Args:
        weights: All weights.
    """
    experts = [weight for weight in weights if weight.group == "experts"]
    if not experts:
        return None
    numbers = {weight.expert for weight in experts if weight.expert is not None}
    if numbers:
        return len(numbers)
    return max(weight.main.shape[0] for weight in experts)


def layers_text(numbers: Iterable[int | None]) -> str:
    """Return the numbers of layers for people: ``layers 0 to 2, 5`` or ``layer 61``.

    Args:
        numbers: The numbers; None for what belongs to no layer.
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
