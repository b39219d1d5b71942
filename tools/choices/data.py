"""The recorded choices: what each release of vLLM accepted, refused and chose on a GB10.

The file is JSONL, with a row for each line of a log, for each release, and for each answer, which
applies to a range of releases. ``docs/tables/choices.md`` shows the same data.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version
from pydantic import Field

from sm121.core import builds, data_file, engine_arguments
from sm121.core.versions import release

FILE = Path(__file__).with_name("vllm-sm121.jsonl")
#: For each kind of choice (attention, experts), the options that together determine it.
DECIDING = {
    "attention": ("attention_backend", "attention_config", "kv_cache_dtype"),
    "experts": ("moe_backend", "quantization_config"),
}
_LAYOUT = "VLLM_KV_CACHE_LAYOUT"


class Answer(data_file.DataTable):
    """A case (machine and arguments) with which a release was run, and the result."""

    #: ``nothing`` (no arguments), ``attention``, ``experts``, ``option``, ``configuration NAME``.
    kind: str
    #: What the machine has. ``cubins``: flashinfer-cubin or its variable, the best case for
    #: FlashInfer.
    machine: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default={})
    how: Literal["executed", "read"]
    #: The release's message, and the place in its code. None if the release does not refuse.
    refused: str | None = None
    by: str | None = None
    at: str | None = None
    attention: str | None = None
    experts: str | None = None
    #: Dense layers that are quantised beyond the checkpoint: layer, method, kernel.
    linear: str | None = None
    kv_cache_dtype: str | None = None
    layout: str | None = None
    #: The layout for each value of the layout variable, and the release's message for refused
    #: values.
    layouts: dict[str, str] = Field(default={})
    layouts_refused: dict[str, str] = Field(default={})
    #: The log lines about the release's choice.
    lines: tuple[str, ...] = ()


class Release(data_file.DataTable):
    """One release of the engine."""

    version: str
    wheel: str
    flashinfer: str
    torch: str | None = None
    #: The module with its command line.
    arguments_in: str
    module_is_deprecated: bool
    stubbed: tuple[str, ...]
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A refusal of a release: the arguments or the variable, and the release's message."""

    release: str
    asked: str
    words: str

    @property
    def message(self) -> str:
        """The refusal in one line."""
        return f"vLLM {self.release} refuses {self.asked} on this architecture: {self.words}"


def load(path: Path = FILE) -> list[Release]:
    """Return the releases, oldest first.

    Args:
        path: The file of the recorded choices.
    """
    rows = []
    for line in path.read_text("utf-8").splitlines():
        rows.append(json.loads(line))
    lines = [row["line"] for row in rows if "line" in row]
    releases = [row["release"] for row in rows if "release" in row]
    order = [each["version"] for each in releases]
    answers: dict[str, list[dict[str, Any]]] = {version: [] for version in order}
    for row in rows:
        if "answer" not in row:
            continue
        first, last = map(order.index, row["releases"])
        texts = []
        for number in row["answer"].get("lines", ()):
            texts.append(lines[number])
        for version in order[first : last + 1]:
            answers[version].append({**row["answer"], "lines": texts})
    loaded = []
    for each in releases:
        loaded.append(Release.model_validate({**each, "answers": answers[each["version"]]}))
    return loaded


def write(releases: Sequence[Release], path: Path = FILE) -> None:
    """Write the file. Neighbouring releases with the same answer share a row.

    Args:
        releases: The releases, oldest first.
        path: The file.
    """
    lines = sorted({line for r in releases for answer in r.answers for line in answer.lines})
    rows: list[dict[str, Any]] = [{"line": line} for line in lines]
    for each in releases:
        rows.append({"release": each.model_dump(exclude={"answers"}, exclude_defaults=True)})
    spans: list[tuple[Answer, list[int]]] = []
    for place, each in enumerate(releases):
        for answer in each.answers:
            places = next((p for same, p in spans if same == answer and p[-1] == place - 1), None)
            if places is None:
                spans.append((answer, [place]))
            else:
                places.append(place)
    for answer, places in spans:
        values = answer.model_dump(exclude_defaults=True)
        if answer.lines:
            values["lines"] = [lines.index(line) for line in answer.lines]
        span = [releases[places[0]].version, releases[places[-1]].version]
        rows.append({"releases": span, "answer": values})
    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def at(releases: Sequence[Release], version: str | None) -> Release | None:
    """Return the recorded release for an installed version.

    This is the release itself, or the one before it with the same minor version. For a build
    (`builds.identity`), only the answers of the parser apply, because the build has its own
    kernels.

    Args:
        releases: The recorded releases.
        version: The installed version; None if it is not known.

    Returns:
        The release; None if there is none, as for builds of a commit.
    """
    number = release(version)
    if number is None:
        return None
    candidates = []
    for item in releases:
        version_of_item = Version(item.version)
        if version_of_item.release[:2] == number.release[:2] and version_of_item <= number:
            candidates.append(item)
    newest = max(candidates, key=lambda item: Version(item.version), default=None)
    if newest is None or builds.named(version) is None:
        return newest
    parsed = tuple(a for a in newest.answers if a.kind == "option" or a.at == "argparse")
    return newest.model_copy(update={"answers": parsed})


def refusals(
    known: Release, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[Refusal]:
    """Return the recorded refusals of a release for a start.

    Args:
        known: The recorded release.
        arguments: The arguments of the start.
        environment: The environment of the start.
    """
    given = values(arguments)
    matches = []
    for answer in known.answers:
        start = values(answer.arguments)
        if answer.machine != "cubins" or not start or answer.refused is None:
            continue
        if answer.kind in DECIDING:
            applies = deciding(answer.kind, given) == deciding(answer.kind, start)
        else:
            applies = answer.kind == "option" and start.keys() <= given.keys()
        if applies:
            matches.append(Refusal(known.version, " ".join(answer.arguments), answer.refused))
    name = environment.get(_LAYOUT)
    for answer in known.answers:
        backend = deciding("attention", values(answer.arguments))
        same = deciding("attention", given) in ({}, backend)
        if answer.kind == "attention" and same and name in answer.layouts_refused:
            words = answer.layouts_refused[name]
            return [*matches, Refusal(known.version, f"{_LAYOUT}={name}", words)]
    return matches


def values(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options with their values. Each key of a JSON value is a separate option.

    Args:
        arguments: The words of a command line.
    """
    read = engine_arguments.parse_options(arguments)
    return {name: value for name, value in read.items() if not value.startswith("{")}


def deciding(kind: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the options that determine the backend.

    Args:
        kind: ``attention`` or ``experts``.
        given: The options of a start, from `values`.
    """
    return {name: v for name, v in given.items() if name.partition(".")[0] in DECIDING[kind]}
