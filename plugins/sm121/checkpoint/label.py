"""The label of a checkpoint: the weight formats that its configuration declares.

The label is ``quantization_config`` in config.json, or ModelOpt's hf_quant_config.json.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm121.checkpoint import weight_tables
from sm121.checkpoint.weights import Weight
from sm121.core.errors import Sm121Error

#: The file of a checkpoint's configuration.
CONFIG = "config.json"
_MODELOPT = "hf_quant_config.json"
#: The keys of ``quantization_config`` that list the modules which are not quantised.
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
#: GPTQModel's table of exceptions. A pattern with this prefix excludes modules.
_DYNAMIC = "dynamic"
_EXCLUDES = "-:"
#: The keys of tables by module (GPTQModel, AutoRound, ModelOpt) that may have other group sizes.
_BY_MODULE = (_DYNAMIC, "extra_config", "quantized_layers")
#: The targets of compressed-tensors that stand for all matrices, and for all experts.
_EVERY = "Linear"
_EXPERTS = "FusedMoE"
_PATTERN = "re:"


@dataclass(frozen=True)
class _Modules:
    """A list of modules in a label. Each entry selects a module and its submodules."""

    #: Names of modules, or dotted parts of such names.
    names: frozenset[str] = frozenset()
    #: Regular expressions that match from the beginning of a name.
    patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[str]) -> "_Modules":
        """Parse the entries: names, names with ``*``, or ``re:`` with a regular expression."""
        names = set()
        patterns = []
        for entry in entries:
            if entry.startswith(_PATTERN):
                patterns.append(entry.removeprefix(_PATTERN))
            elif "*" in entry:
                patterns.append(_of_glob(entry))
            else:
                names.add(entry)
        return cls(frozenset(names), tuple(patterns))

    @property
    def is_empty(self) -> bool:
        """Whether there are no entries."""
        return not self.names and not self.patterns

    def have(self, module: str) -> bool:
        """Return whether an entry selects a module."""
        if self.names and not self.names.isdisjoint(_parts_of(module)):
            return True
        return any(_matches(pattern, module) for pattern in self.patterns)


@dataclass(frozen=True)
class _Group:
    """Modules for which a checkpoint declares a format."""

    #: The modules of the group; empty if it applies to all modules.
    targets: _Modules
    formats: tuple[str, ...]
    #: The parts of a model to which the group applies; empty: all parts.
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Label:
    """The formats that a configuration declares."""

    #: The label as text, for example ``fp8`` or ``modelopt NVFP4``; empty if there is no label.
    name: str
    #: The file from which the label was read.
    file: str
    #: The first group that selects a module applies to it.
    groups: tuple[_Group, ...]
    #: Modules that are not quantised.
    ignored: _Modules
    #: The number of values per scale; None if the label does not contain it.
    group_size: int | None
    #: The method or algorithm, if no row of checkpoint.toml describes it; else empty.
    unknown: str = ""
    #: Whether some modules may have another number of values per scale.
    has_other_group_sizes: bool = False

    def formats_of(self, weight: Weight) -> tuple[str, ...] | None:
        """Return the formats that the checkpoint declares for a weight.

        Args:
            weight: The weight.

        Returns:
            The formats; empty if the weight must not be quantised; None if the label does not
            mention it.
        """
        if self.ignored.have(weight.module):
            return ()
        for group in self.groups:
            if group.parts and weight.part.id not in group.parts:
                continue
            if group.targets.is_empty or group.targets.have(weight.module):
                return group.formats
        return None if self.name else ()


def of_folder(folder: Path, config: Mapping[str, Any]) -> Label:
    """Return the label of a checkpoint, i.e. its declared quantisation.

    Args:
        folder: The folder, which may contain hf_quant_config.json.
        config: The content of its config.json.

    Raises:
        Sm121Error: A file is not JSON.
    """
    table = _table(config)
    file = CONFIG
    if table is None:
        table = read_json(folder / _MODELOPT).get("quantization")
        file = _MODELOPT
    if not isinstance(table, dict):
        return Label("", CONFIG, (), _Modules(), None)
    try:
        return _of_table(table, file, config)
    except (AttributeError, TypeError, ValueError) as error:
        raise Sm121Error(
            f"{folder / file}: expected the quantization_config of a known form ({error})"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; the result is empty if the file does not exist.

    Args:
        path: The file.

    Raises:
        Sm121Error: The file does not contain a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise Sm121Error(f"{path}: expected JSON ({error})") from error
    if not isinstance(data, dict):
        raise Sm121Error(f"{path}: expected a JSON object")
    text = data.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise Sm121Error(f"{path}: text_config: expected a JSON object, got {text!r}")
    return data


def _table(config: Mapping[str, Any]) -> dict[str, Any] | None:
    for holder in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(holder.get(key), dict):
                return dict(holder[key])
    return None


def _of_table(table: Mapping[str, Any], file: str, config: Mapping[str, Any]) -> Label:
    method = str(table.get("quant_method") or "")
    algorithm = str(table.get("quant_algo") or "")
    ignored: list[str] = []
    for key in _IGNORED:
        entries = table.get(key) or ()
        ignored += [entries] if isinstance(entries, str) else map(str, entries)
    for pattern in table.get(_DYNAMIC) or ():
        if pattern.startswith(_EXCLUDES):
            ignored.append(_PATTERN + pattern.removeprefix(_EXCLUDES))
    groups: list[_Group] = []
    expert_dtype = table.get("expert_dtype") or config.get("expert_dtype")
    if expert_dtype:
        groups.append(_Group(_Modules(), _formats(str(expert_dtype)), ("experts",)))
    if table.get("config_groups"):
        schemes = [_of_schemes(group) for group in table["config_groups"].values()]
        groups += sorted(schemes, key=lambda group: group.targets.is_empty and not group.parts)
    elif table.get("quantized_layers"):
        groups += _of_layers(table["quantized_layers"])
    else:
        word = algorithm or method
        row = weight_tables.load().label.get(word.lower())
        formats = _formats(word, table.get("bits"))
        groups.append(_Group(_Modules(), formats, row.parts if row is not None else ()))
    words = [word for word in (method, algorithm) if word]
    unknown = "" if all(group.formats for group in groups) else " ".join(words)
    return Label(
        name=" ".join(words),
        file=file,
        groups=tuple(groups),
        ignored=_Modules.of(ignored),
        group_size=_group_size(table),
        unknown=unknown,
        has_other_group_sizes=_has_other_group_sizes(table),
    )


def _formats(word: str, bits: object = None) -> tuple[str, ...]:
    """Return the formats that a word such as ``fp8`` in a declaration means; empty if unknown."""
    row = weight_tables.load().label.get(word.lower())
    if row is None:
        return ()
    of_integers = f"int{bits}"
    return (of_integers,) if of_integers in row.formats else row.formats


def _of_schemes(group: Mapping[str, Any]) -> _Group:
    """Read one of the ``config_groups`` of compressed-tensors."""
    weights = group.get("weights") or {}
    formats = _formats(f"{weights.get('type')}{weights.get('num_bits')}")
    targets = [str(target) for target in group.get("targets") or ()]
    if _EVERY in targets:
        return _Group(_Modules(), formats)
    if _EXPERTS in targets:
        return _Group(_Modules(), formats, ("experts",))
    return _Group(_Modules.of(targets), formats)


def _of_layers(layers: Mapping[str, Mapping[str, Any]]) -> Iterable[_Group]:
    """Yield a group for each algorithm in ModelOpt's ``quantized_layers`` (mixed precision)."""
    by_algorithm: dict[str, list[str]] = {}
    for name, scheme in layers.items():
        by_algorithm.setdefault(str(scheme.get("quant_algo")), []).append(name)
    for algorithm, names in by_algorithm.items():
        yield _Group(_Modules.of(names), _formats(algorithm))


def _has_other_group_sizes(table: Mapping[str, Any]) -> bool:
    for key in _BY_MODULE:
        entries = table.get(key)
        modules = entries.values() if isinstance(entries, dict) else ()
        if any(isinstance(each, dict) and "group_size" in each for each in modules):
            return True
    return False


def _group_size(table: Mapping[str, Any]) -> int | None:
    sizes: list[Any] = [table.get("group_size")]
    for group in (table.get("config_groups") or {}).values():
        sizes.append((group.get("weights") or {}).get("group_size"))
    for size in sizes:
        if isinstance(size, int) and size > 0:
            return size
    return None


def _parts_of(module: str) -> Iterator[str]:
    """Yield all dotted parts of a name. For a.b.c, these are a, a.b, a.b.c, b, b.c and c."""
    words = module.split(".")
    for first in range(len(words)):
        for last in range(first, len(words)):
            yield ".".join(words[first : last + 1])


def _of_glob(entry: str) -> str:
    """Convert a name with ``*`` to a regular expression. A ``*`` at the end matches any rest."""
    pattern = ".*".join(map(re.escape, entry.split("*")))
    return pattern if entry.endswith("*") else rf"{pattern}(\.|$)"


@functools.cache
def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error:  # the engine will refuse this pattern
        return False


def quantised(formats: Sequence[str]) -> str:
    """Describe formats as text.

    Args:
        formats: The formats that the checkpoint declares for a weight.
    """
    return " or ".join(formats) if formats else "not quantised"
