"""What releases of an engine are known to refuse on a machine: ``fixtures/choices``. The data are
made by ``python -m tools.choices``, which executes the releases; docs/tables/choices.md shows them.
What was not executed is not known here, and nothing is said of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import Version
from pydantic import Field

from sm121.core import builds, data_file
from sm121.core.versions import release

#: Options that decide together, by the kind of the question that was asked of the release.
DECIDING = {
    "attention": ("--attention-backend", "--attention-config", "--kv-cache-dtype"),
    "experts": ("--moe-backend", "--quantization-config"),
}
_LAYOUT = "VLLM_KV_CACHE_LAYOUT"


class Answer(data_file.DataTable):
    """A question to a release, and what it said."""

    #: ``nothing`` (no arguments), ``attention``, ``experts``, ``option``, ``configuration NAME``.
    kind: str
    #: What the box has. ``cubins``: flashinfer-cubin or its variable, the best case of FlashInfer.
    machine: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    how: Literal["executed", "read"]
    #: Why it refuses, in its own words, and at which place of its code. None: it does not.
    refused: str | None = None
    by: str | None = None
    at: str | None = None
    attention: str | None = None
    experts: str | None = None
    #: Dense layers that are quantised beyond the checkpoint: layer, method, kernel.
    linear: str | None = None
    kv_cache_dtype: str | None = None
    layout: str | None = None
    #: What it makes of each value of its variable for the layout, and what it says of the others.
    layouts: dict[str, str] = Field(default={})
    layouts_refused: dict[str, str] = Field(default={})
    #: Places in ``lines`` of the file.
    lines: tuple[int, ...] = ()


class Release(data_file.DataTable):
    """One release of the engine."""

    version: str
    wheel: str
    flashinfer: str
    torch: str | None = None
    #: The module that has its command line.
    arguments_in: str
    module_is_deprecated: bool
    stubbed: tuple[str, ...]
    answers: tuple[Answer, ...]


class Choices(data_file.DataTable):
    """The content of such a file."""

    schema_version: Literal[1]
    engine: str
    arch: str
    lines: tuple[str, ...]
    releases: tuple[Release, ...] = Field(alias="release")

    def at(self, version: str | None) -> Release | None:
        """What is known of an installed version: that release, or the one before it of the same
        minor version. None for what no release is known of, as for builds of a commit. Of a build
        (`builds.identity`) it is what the parser said: its kernels are its own."""
        number = release(version)
        if number is None:
            return None
        candidates = [
            item
            for item in self.releases
            if Version(item.version).release[:2] == number.release[:2]
            and Version(item.version) <= number
        ]
        newest = max(candidates, key=lambda item: Version(item.version), default=None)
        if newest is None or builds.named(version) is None:
            return newest
        parsed = tuple(a for a in newest.answers if a.kind == "option" or a.at == "argparse")
        return newest.model_copy(update={"answers": parsed})


@dataclass(frozen=True)
class Refusal:
    """Something that a release is known to refuse."""

    release: str
    #: The arguments or the variable, as they were given.
    asked: str
    words: str
    #: What the same release takes instead.
    instead: tuple[str, ...]

    @property
    def message(self) -> str:
        """One line."""
        return f"vLLM {self.release} refuses {self.asked} on this architecture: {self.words}"


def load(engine: str, arch: str) -> Choices | None:
    """What is known; None where nothing was executed. Raises DataFileError: the file is wrong."""
    if (engine, arch) != ("vllm", "sm121"):
        return None
    return data_file.load("choices/vllm-sm121.toml", Choices)


def refusals(
    release: Release, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[Refusal]:
    """What a release is known to refuse of a start."""
    pairs = as_pairs(arguments)
    matches = []
    for answer in release.answers:
        start = as_pairs(answer.arguments)
        if answer.machine != "cubins" or not start or answer.refused is None:
            continue
        if answer.kind in DECIDING:
            applies = deciding(answer.kind, pairs) == deciding(answer.kind, start)
        else:
            applies = answer.kind == "option" and start.keys() <= pairs.keys()
        if applies:
            others = [each for each in release.answers if each.kind == answer.kind in DECIDING]
            accepted = (e for e in others if (e.machine, e.refused) == ("cubins", None))
            instead = tuple(" ".join(each.arguments) for each in accepted)
            options = " ".join(answer.arguments)
            matches.append(Refusal(release.version, options, answer.refused, instead))
    name = environment.get(_LAYOUT)
    for answer in release.answers:
        backend = deciding("attention", as_pairs(answer.arguments))
        same = deciding("attention", pairs) in ({}, backend)
        if answer.kind == "attention" and same and name in answer.layouts_refused:
            instead = tuple(f"{_LAYOUT}={other}" for other in answer.layouts)
            words = answer.layouts_refused[name]
            return [*matches, Refusal(release.version, f"{_LAYOUT}={name}", words, instead)]
    return matches


def chosen(
    release: Release, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, list[str]]:
    """What a release was seen to choose for such a start: each choice, with the machines (with or
    without a network, FlashInfer's cubins, nvcc) that it was seen on."""
    pairs, table = as_pairs(arguments), dict[str, list[str]]()
    for answer in release.answers:
        if answer.kind != "nothing" and not answer.kind.startswith("configuration "):
            continue
        tried = as_pairs(answer.arguments)
        same = all(deciding(kind, pairs) == deciding(kind, tried) for kind in DECIDING)
        if not same or answer.environment.get(_LAYOUT) != environment.get(_LAYOUT):
            continue
        parts = (("attention", answer.attention), ("moe", answer.experts), ("KV", answer.layout))
        machines = table.setdefault(", ".join(f"{name} {value}" for name, value in parts), [])
        if answer.machine not in machines:
            machines.append(answer.machine)
    return table


def deciding(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Of these options those that decide about ``attention`` or ``experts``."""
    return {name: given[name] for name in DECIDING[kind] if name in given}


def as_pairs(arguments: Sequence[str]) -> dict[str, Any]:
    """Options with their values; a value that is JSON is compared as such."""
    pairs: dict[str, Any] = {}
    key_path: list[str] = []
    for word in arguments:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            head, *keys = name.split(".")  # --option.key is a key of its JSON
            key_path = [head.replace("_", "-"), *keys]
        elif key_path:
            equals, value = "=", word
        table = pairs
        for key in key_path[:-1]:
            if not isinstance(table.get(key), dict):
                table[key] = {}
            table = table[key]
        for key in key_path[-1:]:
            table[key] = _value(value) if equals else None
    return pairs


def _value(text: str) -> Any:
    try:
        return json.loads(text) if text.startswith("{") else text
    except ValueError:
        return text
