"""Write docs/tables/choices.md from the recorded data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from tools.choices.data import Release

T = TypeVar("T")

INTRODUCTION = """
# What a release chooses on a GB10

<!-- made by `python -m tools.choices` -->

A release of vLLM chooses its kernels in Python code, so this choice can be recorded without a
GB10. `python -m tools.choices` downloads every release from 0.24.0 on from the package index, and
0.14.0, on which the MXFP4 build is based; of the MXFP4 build, only the parser is known. It runs
each release in a separate process: the release parses arguments, makes its configuration, and
builds gpt-oss-120b (one layer of each kind, without weights). The layers choose attention and
experts when they are created. The Python code is that of the CUDA wheel for x86-64. The wheels
for aarch64 have the same Python files (0.24.0, 0.28.0 and 0.33.0 were compared).

The tool replaces the machine: NVML (capability 12.1, `NVIDIA GB10`, memory not supported),
`torch.cuda` (CUDA 13.0, 48 multiprocessors, 119.6 GiB, integrated), the network, and the compiled
extensions, which choose nothing. torch is this environment's CPU build (2.9.1 for 0.14.0, by
`--release 0.14.0 --python PATH`). Each release runs with the FlashInfer that its metadata pin,
and with the versions that `--flashinfer` names. `executed` means that the release's code gave the
answer; `read` means that the code stopped before, and the answer was read at the given place.

All releases from 0.24.0 on accept `linear` in `--quantization-config`. Before 0.30 it has no
effect. From 0.30 on it quantises qkv and o beyond the checkpoint, with the kernels below; lm_head
stays BF16. A token of gpt-oss-120b without context then reads fewer bytes:

| qkv, o | GB a token | tok/s at most: 218 GB/s | 235 | 273 |
| --- | --- | --- | --- | --- |
| BF16 | 5.00 | 43.6 | 47.0 | 54.6 |
| FP8 | 4.05 | 53.9 | 58.1 | 67.5 |
| MXFP8 | 4.08 | 53.5 | 57.6 | 67.0 |
| MXFP4, activations as well | 3.60 | 60.6 | 65.3 | 75.9 |
| the MXFP4 build: lm_head in MXFP4 as well | 2.75 | 79.3 | 85.5 | 99.3 |

It was not measured whether these kernels work on a GB10.

Machines: *online* can download from NVIDIA's store of kernels, *offline* has no network; *cubins*
has flashinfer-cubin, or sets `VLLM_HAS_FLASHINFER_CUBIN=1`. All have nvcc and ninja unless the
table says otherwise.

The data are `tools/choices/vllm-sm121.jsonl`. No run reads them, because a server's log shows its
own choices and refusals. `make test` compares the profile and the matrix with the data, and the
signatures with the lines. """


def _chosen(answer: dict[str, Any]) -> str:
    if answer.get("refused"):
        return "refused"
    names = ("experts", "linear", "layout", "kv_cache_dtype")
    words = [answer.get("attention", "parsed"), *map(answer.get, names)]
    return ", ".join(word for word in words if word) + (
        "" if answer["how"] == "executed" else " (read)"
    )


def _asked(answer: dict[str, Any]) -> str:
    kind: str = answer["kind"]
    if kind.startswith("configuration"):
        return kind
    if answer.get("arguments"):
        return _code(" ".join(answer["arguments"]))
    return "no arguments"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    if "`" in text:
        return f"`` {_cell(text)} ``"
    return f"`{_cell(text)}`"


def _span(versions: list[str]) -> str:
    if len(versions) == 1:
        return versions[0]
    return f"{versions[0]} to {versions[-1]}"


def _spans(found: list[str], known: list[str]) -> str:
    """Return a list of releases as text, in which consecutive recorded releases are a range."""
    spans: list[list[str]] = []
    for version in known:
        if version in found and spans and known[known.index(version) - 1] == spans[-1][-1]:
            spans[-1].append(version)
        elif version in found:
            spans.append([version])
    return ", ".join(map(_span, spans))


def _runs(found: list[tuple[str, T]]) -> list[tuple[list[str], T]]:
    """Group neighbouring releases that have the same value, and keep their order."""
    runs: list[tuple[list[str], T]] = []
    for version, value in found:
        if runs and runs[-1][1] == value:
            runs[-1][0].append(version)
        else:
            runs.append(([version], value))
    return runs


def write(known: Sequence[Release], page: Path) -> None:
    """Write the page.

    Args:
        known: The recorded releases, oldest first.
        page: The file.
    """
    releases = [each.model_dump() for each in known]
    out = [INTRODUCTION.strip(), "", "## Chosen", ""]
    questions: dict[tuple[str, str], list[tuple[str, str]]] = {}
    words: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for release in releases:
        for answer in release["answers"]:
            if answer["kind"] == "option":
                if answer.get("refused"):
                    key = (_asked(answer), "any")
                    words.setdefault(key, []).append((release["version"], answer["refused"]))
                continue
            key = (_asked(answer), answer["machine"])
            questions.setdefault(key, []).append((release["version"], _chosen(answer)))
            if answer.get("refused"):
                said = f"{_code(answer['refused'])} ({answer['at']}, {answer['how']})"
                words.setdefault(key, []).append((release["version"], said))
    out += [
        "| asked for | machine | release | attention, experts, dense layers, KV layout and dtype |",
        "| --- | --- | --- | --- |",
    ]
    for (asked, machine), found in questions.items():
        for versions, text in _runs(found):
            out.append(f"| {asked} | {machine} | {_span(versions)} | {text} |")
    out += ["", "## Refused, in the release's own words", ""]
    out += ["| asked for | machine | release | words, and where |", "| --- | --- | --- | --- |"]
    for (asked, machine), found in words.items():
        for versions, text in _runs(found):
            out.append(f"| {asked} | {machine} | {_span(versions)} | {text} |")
    out += ["", "## KV layouts", "", "By `VLLM_KV_CACHE_LAYOUT`, with FlashInfer's cubins.", ""]
    out += ["| attention | release | taken as | refused |", "| --- | --- | --- | --- |"]
    for backend in ("FLASHINFER", "TRITON_ATTN"):
        for versions, (taken, refused) in _runs(_seen_layouts(releases, backend)):
            out.append(f"| {backend} | {_span(versions)} | {taken} | {_cell(refused)} |")
    out += ["", "## Releases", ""]
    out += [
        "| release | wheel | FlashInfer | torch | parser in | module to start | stood in for |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in releases:
        start = "deprecated" if r["module_is_deprecated"] else "supported"
        stubbed = ", ".join(name.removeprefix("vllm.") for name in r["stubbed"])
        out.append(
            f"| {r['version']} | {r['wheel']} | {r['flashinfer']} | {r['torch'] or ''} | "
            f"{r['arguments_in'].removeprefix('vllm.entrypoints.')} | {start} | {stubbed} |"
        )
    out += ["", "## Lines", "", "What they log of it; `fixtures/signatures` must know them.", ""]
    out += ["| line | release |", "| --- | --- |", *_lines(releases)]
    page.write_text("\n".join(out) + "\n", encoding="utf-8")


def _seen_layouts(
    releases: list[dict[str, Any]], backend: str
) -> list[tuple[str, tuple[str, str]]]:
    """Return each release that used the backend, with the KV layouts it took and refused."""
    seen = []
    for release in releases:
        for answer in release["answers"]:
            if answer.get("attention") == backend and answer.get("layouts"):
                layouts = (_layouts(answer), _refused_layouts(answer))
                seen.append((release["version"], layouts))
    return seen


def _lines(releases: list[dict[str, Any]]) -> list[str]:
    """Return a row for each line that a release logs."""
    versions_of: dict[str, list[str]] = {}
    for release in releases:
        for line in sorted({line for answer in release["answers"] for line in answer["lines"]}):
            versions_of.setdefault(line, []).append(release["version"])
    everything = [release["version"] for release in releases]
    rows = []
    for line, versions in sorted(versions_of.items()):
        rows.append(f"| {_code(line)} | {_spans(versions, everything)} |")
    return rows


def _layouts(answer: dict[str, Any]) -> str:
    return ", ".join(k if k == v else f"{k} = {v}" for k, v in answer["layouts"].items())


def _refused_layouts(answer: dict[str, Any]) -> str:
    refused = answer.get("layouts_refused", {})
    if refused:
        return f"{', '.join(refused)}: {next(iter(refused.values()))}"
    return "none"
