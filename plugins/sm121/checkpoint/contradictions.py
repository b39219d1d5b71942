"""Find contradictions between a checkpoint's declared quantisation and its tensors."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sm121.checkpoint import label, weight_tables, weights
from sm121.checkpoint.label import Label
from sm121.checkpoint.weights import Weight
from sm121.core.unmet import Fact

#: The ``kind`` of the facts about contradictions of a checkpoint.
KIND = "checkpoint label"
#: The formats that are not quantised.
_FLOATS = ("float64", "float32", "bfloat16", "float16")
#: If the checkpoint's configuration declares that a part of the model is quantised, at most this
#: share of the part's values may be stored unquantised. Such exceptions are handled by the engine's
#: model code (for example for DeepSeek-V4's compressor).
_MOST = 0.5
#: Padded scales change the number of values per scale by less than this factor.
_PADDING = 1.5
#: Matrices of a module that exist only together. Keys and values are not listed, because layers may
#: share them.
_TOGETHER = (("gate_proj", "up_proj", "down_proj"), ("q_proj", "o_proj"))


@dataclass(frozen=True)
class LabelJudgement:
    """The result of comparing the declared quantisation (the label) with the stored tensors."""

    #: The contradictions.
    facts: tuple[Fact, ...]
    #: A line for each tolerated exception: unquantised matrices that the label does not exclude.
    notes: tuple[str, ...]
    #: A line for each thing that could not be judged.
    unjudged: tuple[str, ...] = ()


def compare_label(own: Label, held: Sequence[Weight], config: Mapping[str, Any]) -> LabelJudgement:
    """Compare the declared quantisation of a checkpoint with its weights.

    Args:
        own: The declared quantisation.
        held: All weights.
        config: The checkpoint's config.json.

    Returns:
        One fact, with the layers, for each combination of a part, a required and an observed
        format.
    """
    facts = [*_wrong_experts(held, config), *_missing_layers(held, config)]
    facts += _missing_matrices(held)
    if own.unknown:
        line = f"the declared quantisation {own.unknown}: no row of checkpoint.toml describes it"
        return LabelJudgement(tuple(facts), (), (line,))
    matrices = [_Matrix.of(own, each) for each in held if _is_judged(own, each)]
    left, notes = _left_alone(matrices)
    wrong = [each for each in matrices if each.is_wrong]
    facts += [*_facts(own, [*wrong, *left]), *_without_scale(matrices)]
    facts += _wrong_group_size(own, matrices)
    unjudged = [*_unjudged(matrices), *_unjudged_group_sizes(own, matrices)]
    return LabelJudgement(tuple(facts), tuple(notes), tuple(unjudged))


@dataclass(frozen=True)
class _Matrix:
    """A matrix, and the formats that the checkpoint declares for it."""

    weight: Weight
    #: The formats in the label. Empty if the matrix must not be quantised; None if the label does
    #: not mention the matrix.
    formats: tuple[str, ...] | None

    @classmethod
    def of(cls, own: Label, weight: Weight) -> "_Matrix":
        return cls(weight, own.formats_of(weight))

    @property
    def is_float(self) -> bool:
        return self.weight.format in _FLOATS

    @property
    def is_wrong(self) -> bool:
        """Whether the matrix has none of the formats that the checkpoint declares for it."""
        if self.is_float or self.formats is None:
            return False
        if not self.weight.is_described and self.formats:
            return False  # the matrix may have the label's format in a form that no row describes
        return self.weight.format not in self.formats

    @property
    def is_left_alone(self) -> bool:
        """Whether the matrix is not quantised, although the checkpoint declares a format for it."""
        return self.is_float and bool(self.formats)

    @property
    def role(self) -> str:
        """The name of the module without the numbers of layer and expert."""
        return weights.role(self.weight.module)


def _is_judged(own: Label, weight: Weight) -> bool:
    """Return whether the declared quantisation must agree with the format of a weight.

    It must agree for the matrices of layers. Engines treat an embedding, an output matrix or a
    router in ways of their own. These are therefore judged only if they are quantised although the
    declaration is missing or excludes them.
    """
    if weight.format is None or weight.part.read == "nothing":
        return False
    if not weight.is_described and not _may_be_packed(weight):
        return False
    if weight.part.linear:
        return True
    is_quantised = weight.is_described and weight.format not in _FLOATS
    return is_quantised and own.formats_of(weight) == ()


def _may_be_packed(weight: Weight) -> bool:
    """Return whether a tensor may contain packed values of a weight.

    Masks of an attention (GPT-2's ``attn.bias``) and tables of a router have integers, too.
    """
    dtypes = {dtype for row in weight_tables.load().format for dtype in row.dtypes}
    return weight.main.dtype in dtypes and not weight.main.name.endswith("bias")


def _without_scale(matrices: Sequence[_Matrix]) -> Iterator[Fact]:
    """Yield a fact for quantised matrices without a scale, if those of other layers have one."""
    groups: dict[str, list[Weight]] = {}
    for each in _lacking_scales(matrices):
        groups.setdefault(each.weight.group, []).append(each.weight)
    for group, these in groups.items():
        yield Fact(
            required="a scale for each quantised matrix, as for the others of its name",
            observed="no scale",
            about=_subject(group, these),
            kind=KIND,
            evidence=f"{len(these)} weights, such as {these[0].main}",
        )


def _lacking_scales(matrices: Sequence[_Matrix]) -> list[_Matrix]:
    scaled = {each.role for each in matrices if each.weight.has_scale}
    lacking = []
    for each in matrices:
        if not each.is_float and not each.weight.has_scale and each.role in scaled:
            lacking.append(each)
    return lacking


def _unjudged(matrices: Sequence[_Matrix]) -> Iterator[str]:
    """Yield a line for each part with a format or a scale that the suite cannot read."""
    groups: dict[tuple[str, str], list[Weight]] = {}
    lacking = _lacking_scales(matrices)
    for each in matrices:
        if each.formats and not each.is_float and not each.weight.has_scale and each not in lacking:
            kind = str(each.weight.format)
            if each.weight.is_described:
                kind += " without a known scale"
            key = (each.weight.group, kind)
            groups.setdefault(key, []).append(each.weight)
    for (group, kind), these in groups.items():
        first = these[0].main
        yield f"{group}: the format of {len(these)} weights is {kind}, such as {first}"


def _wrong_group_size(own: Label, matrices: Sequence[_Matrix]) -> Iterator[Fact]:
    """Yield a fact for each part whose group size (values per scale) is not the declared one."""
    if _has_several_group_sizes(own):
        return
    for (group, size), these in _other_group_sizes(own, matrices).items():
        yield Fact(
            required=f"{own.group_size} values per scale ({own.name} in {own.file})",
            observed=f"{size} values per scale",
            about=_subject(group, these),
            kind=KIND,
            evidence=f"{len(these)} weights, such as {these[0].main}",
        )


def _unjudged_group_sizes(own: Label, matrices: Sequence[_Matrix]) -> Iterator[str]:
    """Yield a line for each part whose group size may be an exception from the declared one.

    The group size is the number of values per scale.
    """
    if not _has_several_group_sizes(own):
        return
    for (group, size), these in _other_group_sizes(own, matrices).items():
        yield (
            f"{group}: {len(these)} weights have {size} values per scale, such as "
            f"{these[0].main}; {own.name} in {own.file} has {own.group_size}, and may have other "
            "numbers for some modules"
        )


def _has_several_group_sizes(own: Label) -> bool:
    """Return whether a checkpoint declares several groups, or exceptions for some modules."""
    return own.has_other_group_sizes or len(own.groups) != 1


def _other_group_sizes(
    own: Label, matrices: Sequence[_Matrix]
) -> dict[tuple[str, int], list[Weight]]:
    """Return, for each part, the weights whose group size differs from the declared one."""
    groups: dict[tuple[str, int], list[Weight]] = {}
    if own.group_size is None:
        return groups
    for each in matrices:
        size = each.weight.group_size
        inputs = each.weight.inputs
        if not size or each.weight.format not in (each.formats or ()):
            continue
        if inputs and math.ceil(inputs / own.group_size) == each.weight.input_scales:
            continue  # the last group may be smaller
        if max(size, own.group_size) >= _PADDING * min(size, own.group_size):
            groups.setdefault((each.weight.group, size), []).append(each.weight)
    return groups


def _left_alone(matrices: Sequence[_Matrix]) -> tuple[list[_Matrix], list[str]]:
    """Return unquantised matrices that contradict the declaration, and notes on the tolerated ones.

    Unquantised matrices are a contradiction if they make up more than half of a part, or if the
    same matrix is quantised in other layers.
    """
    described = [each for each in matrices if each.weight.is_described]
    quantised_roles = {each.role for each in described if not each.is_float}
    wrong = []
    notes = []
    for group in dict.fromkeys(each.weight.group for each in matrices if each.is_left_alone):
        claimed = [each for each in matrices if each.formats and each.weight.group == group]
        left = [each for each in claimed if each.is_float]
        is_most = _values(left) > _MOST * _values(claimed)
        noted: dict[str, str] = {}
        for each in left:
            if is_most or each.role in quantised_roles:
                wrong.append(each)
            else:
                noted[each.role] = str(each.weight.format)
        if noted:
            roles = ", ".join(f"{role} {kind}" for role, kind in sorted(noted.items()))
            notes.append(
                f"{group}: not quantised, although the declared quantisation includes them: {roles}"
            )
    return wrong, notes


def _values(matrices: Iterable[_Matrix]) -> int:
    return sum(each.weight.values for each in matrices)


def _facts(own: Label, wrong: Iterable[_Matrix]) -> Iterator[Fact]:
    """Yield a fact for each combination of part, required format and observed format."""
    groups: dict[tuple[str, str, str], list[Weight]] = {}
    for each in wrong:
        required = label.quantised(each.formats or ())
        key = (each.weight.group, required, str(each.weight.format))
        groups.setdefault(key, []).append(each.weight)
    said = f"{own.name} in {own.file}" if own.name else f"no quantization_config in {own.file}"
    for (group, required, observed), these in groups.items():
        yield Fact(
            required=f"{required} ({said})",
            observed=observed,
            about=_subject(group, these),
            kind=KIND,
            evidence=f"{len(these)} weights, such as {these[0].main}",
        )


def _wrong_experts(held: Sequence[Weight], config: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield a fact if the number of experts differs between the tensors and the configuration."""
    stored = weights.stored_experts(held)
    said = number(config, weight_tables.load().keys.experts)
    if stored is None or said is None or stored == said:
        return
    yield Fact(
        required="number of experts in config.json:",
        limit=said,
        value=stored,
        about="experts",
        kind=KIND,
    )


def _missing_layers(held: Sequence[Weight], config: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield a fact if the configuration has layers of which no tensor is stored."""
    layers = number(config, ("num_hidden_layers",))
    stored = {each.layer for each in held if not each.drafts and each.part.read != "nothing"}
    stored.discard(None)
    missing = sorted({*range(layers or 0)} - stored)
    if stored and missing:
        yield Fact(
            required=f"tensors of each of the {layers} layers of config.json",
            observed=f"none of {weights.layers_text(missing)}",
            about="layers",
            kind=KIND,
        )


def _missing_matrices(held: Sequence[Weight]) -> Iterator[Fact]:
    """Yield a fact for each matrix that a module of a layer lacks, and other layers have."""
    modules: dict[str, dict[str, Weight]] = {}
    for each in held:
        parent, _, name = each.module.rpartition(".")
        modules.setdefault(parent, {})[name] = each
    for together in _TOGETHER:
        whole = set()
        for parent, own in modules.items():
            if all(name in own for name in together):
                whole.add(weights.role(f"{parent}."))
        missing: dict[tuple[str, str], list[Weight]] = {}
        for parent, own in modules.items():
            stored = [own[name] for name in together if name in own]
            if not stored or weights.role(f"{parent}.") not in whole:
                continue
            for name in together:
                if name not in own:
                    missing.setdefault((stored[0].group, name), []).append(stored[0])
        for (group, name), these in missing.items():
            yield Fact(
                required=f"{', '.join(together)}, as in other layers",
                observed=f"no {name}",
                about=_subject(group, these),
                kind=KIND,
                evidence=f"{len(these)} modules, such as the one of {these[0].main}",
            )


def _subject(group: str, held: Iterable[Weight]) -> str:
    """Return the part of the model that weights belong to, with the numbers of their layers."""
    layers = weights.layers_text(each.layer for each in held)
    return f"{group}, {layers}" if layers else group


def number(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    """Return the first integer that a configuration has for one of several keys, or None.

    Args:
        config: The config.json of a model. A ``text_config`` in it is searched first.
        keys: The keys.
    """
    for holder in (config.get("text_config") or {}, config):
        for key in keys:
            if isinstance(holder.get(key), int):
                return int(holder[key])
    return None
