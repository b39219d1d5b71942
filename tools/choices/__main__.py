"""Find out which arguments each release of vLLM accepts and which kernels it chooses on a GB10, and
write the data and the page.

``python -m tools.choices`` reads the list of releases from the package index, downloads their
wheels into a cache (it keeps the Python code, 40 MB each), and runs each release in its own
process, which takes about two minutes. ``--page`` writes only the page, from the stored data.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from sm121.core import profile as profiles
from sm121.core.engine_settings import Configuration
from tools.choices import data, page, releases

ROOT = Path(__file__).parents[2]
PROFILE = "sm121-gpt-oss-120b"
SINCE = Version("0.24.0")
LAYOUTS = ("NHD", "HND", "LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC")
CUTLASS = ("--moe-backend", "flashinfer_cutlass")
MXFP8 = ("--quantization-config", '{"moe":{"activation":"mxfp8"}}')
#: Formats to which dense layers may be quantised while they are loaded.
LINEAR = ("fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8", "mxfp4")
FP8_KV = ("--kv-cache-dtype", "fp8")
CUBINS = {"VLLM_HAS_FLASHINFER_CUBIN": "1"}


def dense(linear: str, activation: str | None = None) -> tuple[str, ...]:
    """Return arguments that quantise the dense layers.

    Args:
        linear: The format of the dense layers, one of `LINEAR`.
        activation: The format of the experts' activations; None to leave them.
    """
    wanted: dict[str, Any] = {"linear": linear}
    if activation is not None:
        wanted["moe"] = {"activation": activation}
    return ("--quantization-config", json.dumps(wanted, separators=(",", ":")))


#: The cases that each release runs in addition to the profile's: name, machine, arguments.
PARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("nothing", "online", ()),
    ("nothing", "offline", ()),
    ("nothing", "cubins", ()),
    ("nothing", "online, no nvcc", ()),
    ("nothing", "cubins, no nvcc", ()),
    ("attention", "cubins", ("--attention-backend", "FLASHINFER")),
    ("attention", "offline", ("--attention-backend", "FLASHINFER")),
    ("attention", "cubins", ("--attention-backend", "TRITON_ATTN")),
    ("attention", "cubins", ("--attention-backend", "FLASH_ATTN")),
    ("attention", "cubins", ("--attention-backend", "FLEX_ATTENTION")),
    ("experts", "cubins", ("--moe-backend", "marlin")),
    ("experts", "cubins", ("--moe-backend", "triton")),
    ("experts", "cubins", CUTLASS),
    ("experts", "cubins", (*CUTLASS, *MXFP8)),
    ("experts", "cubins", ("--moe-backend", "flashinfer_trtllm")),
    ("experts", "cubins", MXFP8),
    *(("experts", "cubins", dense(name)) for name in LINEAR),
    *(("experts", "cubins", (*CUTLASS, *dense(name, "mxfp8"))) for name in LINEAR),
    ("attention", "cubins", FP8_KV),
    ("attention", "cubins", ("--attention-backend", "FLASHINFER", *FP8_KV)),
    ("attention", "cubins", ("--attention-backend", "TRITON_ATTN", *FP8_KV)),
)
#: Log lines that the replaced machine causes: it starts no workers, and a child process of the
#: release that queries the memory finds no GPU.
_NOT_OURS = ("parallel_state.py", "importing.py", "import_utils.py", "scheduler.py")
#: Exceptions by which a release refuses arguments; any other exception means that it did not run.
_REFUSALS = (
    "ValueError",
    "ValidationError",
    "NotImplementedError",
    "RuntimeError",
    "AssertionError",
)


def model(folder: Path) -> None:
    """Write ``config.json`` of gpt-oss-120b, with one layer of each kind.

    Args:
        folder: The folder of the model.
    """
    fixtures = ROOT / "fixtures"
    config = json.loads((fixtures / "canary/checkpoint/config.json").read_text("utf-8"))
    real = json.loads((fixtures / "models/gpt-oss-120b.json").read_text("utf-8"))
    for name in ("_source", "layer_types", "dtype", "quantization_config"):
        del real[name]
    config |= {**real, "num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def toolkit(folder: Path) -> Path:
    """Create an ``nvcc`` and a ``ninja`` that can be found but do nothing.

    Args:
        folder: The folder in which ``bin`` is created.

    Returns:
        The same folder.
    """
    bin_ = folder / "bin"
    bin_.mkdir()
    for name in ("nvcc", "ninja"):
        (bin_ / name).write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
        (bin_ / name).chmod(0o755)
    return folder


def machine(name: str, tools: Path) -> dict[str, Any]:
    """Return the network and the environment variables of a simulated machine.

    Args:
        name: The machine's name. The words ``online``, ``cubins`` and ``no nvcc`` in it count.
        tools: The folder of `toolkit`.
    """
    with_nvcc = "no nvcc" not in name
    path = "/usr/sbin:/sbin" if not with_nvcc else f"{tools}/bin:/usr/bin:/bin"
    environment = {"PATH": path, "CUDA_HOME": str(tools if with_nvcc else tools / "none")}
    if "cubins" in name:
        environment |= CUBINS
    return {"machine": name, "online": "online" in name, "environment": environment}


def cases(version: str, tools: Path, folder: Path, flashinfer: str | None) -> list[dict[str, Any]]:
    """Return all cases for one release.

    Args:
        version: The release of vLLM.
        tools: The folder of `toolkit`.
        folder: The folder of `model`.
        flashinfer: The version of FlashInfer if it is not the pinned one. Then there are only a few
            cases.
    """
    profile = profiles.load(PROFILE)
    own = list(profile.engine.arguments)
    asked: list[dict[str, Any]] = []

    def put(kind: str, on: str, arguments: list[str], **more: Any) -> None:
        case = {
            "kind": kind,
            "arguments": arguments,
            "variables": {},
            "layouts": [],
            "parse_only": False,
            **machine(on, tools),
            **more,
        }
        case["environment"] = {**case["environment"], **case["variables"]}
        case["model"] = ["--model", str(folder)]
        asked.append(case)

    if flashinfer is not None:
        on = f"cubins, FlashInfer {flashinfer}"
        put("nothing", on, [])
        put("attention", on, ["--attention-backend", "FLASHINFER"])
        put("experts", on, [*CUTLASS, *MXFP8])
    else:
        parts = list(PARTS)
        single = options(own)
        taken = _configurations(profile, version)
        for configuration in taken.values():
            given = options(list(configuration.arguments))
            for kind in data.DECIDING:
                words = tuple(
                    word for o in given if data.deciding(kind, data.values(o)) for word in o
                )
                if words and (kind, "cubins", words) not in parts:
                    parts.append((kind, "cubins", words))
            single += [o for o in given if not _decides(o) and o not in single]
        for kind, on, arguments in parts:
            layouts = list(LAYOUTS) if kind == "attention" and on == "cubins" else []
            put(kind, on, list(arguments), layouts=layouts)
        for name, configuration in taken.items():
            put(
                f"configuration {name}",
                "cubins",
                [*own, *_without_drafter(list(configuration.arguments))],
                variables={**profile.engine.environment, **configuration.environment},
            )
        for option in single:
            put("option", "cubins", option, parse_only=True)
    return [{**case, "name": str(number)} for number, case in enumerate(asked)]


def _configurations(profile: profiles.Profile, version: str) -> dict[str, Configuration]:
    """Return the profile's configurations for a release, by name."""
    taken = {}
    for name, releases_of_it in profile.configurations.items():
        configuration = releases_of_it.at(version)
        if configuration:
            taken[name] = configuration
    return taken


def _without_drafter(arguments: list[str]) -> list[str]:
    """Return arguments without a drafter: a release reads its configuration from the network."""
    if "--speculative-config" not in arguments:
        return arguments
    at = arguments.index("--speculative-config")
    return [*arguments[:at], *arguments[at + 2 :]]


def _decides(option: list[str]) -> bool:
    return any(data.deciding(kind, data.values(option)) for kind in data.DECIDING)


def options(arguments: list[str]) -> list[list[str]]:
    """Return each option with its value. The two options of tool choice need each other.

    Args:
        arguments: The words of a command line, of which the first is an option.
    """
    found: list[list[str]] = []
    for word in arguments:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    together = []
    for o in found:
        if o[0] in ("--enable-auto-tool-choice", "--tool-call-parser"):
            together.append(o)
    apart = [o for o in found if o not in together]
    return [*apart, *([[word for o in together for word in o]] if together else [])]


def ask(
    release: releases.Unpacked, kernels: releases.Unpacked, flashinfer: str | None, python: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run one release with one FlashInfer.

    Args:
        release: The release of vLLM.
        kernels: The FlashInfer.
        flashinfer: The version of FlashInfer if it is not the pinned one, else None.
        python: An interpreter with the other packages that the release imports.

    Returns:
        The answers, and the compiled modules that were replaced.

    Raises:
        SystemExit: The release did not answer every case.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model(folder)
        asked = cases(release.version, toolkit(folder), folder, flashinfer)
        installed = metadata.packages_distributions().items()
        packages = [name for name, of in installed if "flashinfer-python" in of]
        job = {
            "packages": packages,
            "path": [str(release.folder), str(kernels.folder)],
            "compiled": [*release.compiled, *kernels.compiled],
            "cases": asked,
        }
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HOME": scratch,
            "FLASHINFER_WORKSPACE_BASE": scratch,
        }
        environment.pop("PYTHONPATH", None)
        ran = subprocess.run(
            [python, str(Path(__file__).with_name("probe.py"))],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            env=environment,
            cwd=scratch,
        )
        answers = {}
        for a in map(json.loads, ran.stdout.splitlines()):
            answers[a["name"]] = a
        if len(answers) != len(asked):
            raise SystemExit(
                f"{release.wheel}: it answered {len(answers)} of {len(asked)} questions:\n"
                f"{ran.stderr[-3000:]}"
            )
        kept = []
        for case in asked:
            kept.append(answer_of(case, answers[case["name"]], scratch))
    return kept, [name for answer in answers.values() for name in answer["stubbed"]]


def execute(version: str, cache: Path, others: list[str], python: str) -> dict[str, Any]:
    """Run one release with its pinned FlashInfer, and with other versions of FlashInfer.

    Args:
        version: The release of vLLM.
        cache: The folder of unpacked wheels.
        others: The other versions of FlashInfer.
        python: An interpreter with the other packages that the release imports.

    Returns:
        A row for `data.Release`.

    Raises:
        SystemExit: The release pins no FlashInfer, or did not answer every case.
    """
    release = releases.unpack("vllm", version, cache)
    wanted = release.requires("flashinfer-python")
    if wanted is None:
        raise SystemExit(f"{release.wheel}: its metadata pin no flashinfer-python")
    pinned = releases.unpack("flashinfer-python", wanted, cache)
    kept, stubbed = ask(release, pinned, None, python)
    for other in others:
        kernels = releases.unpack("flashinfer-python", other, cache)
        kept += ask(release, kernels, other, python)[0]
    server = release.folder / "vllm/entrypoints/openai/api_server.py"
    return {
        "version": version,
        "wheel": release.wheel,
        "flashinfer": wanted,
        "torch": release.requires("torch"),
        "arguments_in": release.arguments_in(),
        "module_is_deprecated": "command is deprecated" in server.read_text("utf-8"),
        "stubbed": sorted(set(stubbed)),
        "answers": kept,
    }


def answer_of(case: dict[str, Any], seen: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Return one case and its answer, without paths of this machine.

    Args:
        case: The case.
        seen: The answer that probe.py printed.
        scratch: The temporary folder of the run.

    Raises:
        SystemExit: The case failed in the probe.
    """
    kept: dict[str, Any] = {
        "kind": case["kind"],
        "machine": case["machine"],
        "arguments": case["arguments"],
        "environment": case["variables"],
    }
    refused = seen.get("refused")
    if "failed" in seen:
        raise SystemExit(f"{case['kind']}: {seen['failed']}")
    if refused is not None:
        word = refused["words"].split(":", 1)[0]
        kept["how"] = "executed"
        if refused["at"] != "argparse" and (word not in _REFUSALS or "aten::" in refused["words"]):
            kept["how"] = "read"
            sys.stderr.write(f"{case['kind']} {case['arguments']}: {refused['trace']}")
        words = refused["words"].removeprefix("probe.py: error: ").replace(scratch, "MODEL")
        words = re.sub(r"\s+", " ", words)
        kept |= {"refused": words[:400], "by": refused["by"]}
        kept["at"] = re.sub(r"(\.py):\d+", r"\1", refused["at"])
    else:
        kept["how"] = "executed"
        for field in ("attention", "experts", "linear", "kv_cache_dtype"):
            if field in seen:
                kept[field] = "+".join(seen[field])
        kept["layout"] = seen.get("layout")
        layouts = seen.get("layouts", {})
        kept["layouts"] = {name: value for name, value in layouts.items() if ":" not in value}
        kept["layouts_refused"] = {name: value for name, value in layouts.items() if ":" in value}
    kept["lines"] = []
    for line in seen.get("lines", ()):
        if line["file"] not in _NOT_OURS and scratch not in line["text"]:
            text = f"{line['level']} [{line['file']}] {line['text']}"
            kept["lines"].append(text.split("\n")[0][:300])
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=data.FILE)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/tables/choices.md")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/sm121/releases")
    parser.add_argument("--release", action="append", help="these alone, the others are kept")
    parser.add_argument(
        "--flashinfer", action="append", default=[], help="another one beside the pinned one"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="an interpreter with what an old release imports"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--page", action="store_true", help="the page alone, from the data")
    given = parser.parse_args()
    if not given.page:
        given.cache.mkdir(parents=True, exist_ok=True)
        wanted = given.release or [str(version) for version in releases.published(SINCE)]
        known = data.load(given.data) if given.data.is_file() else []
        with ThreadPoolExecutor(given.jobs) as pool:
            made = pool.map(
                lambda v: execute(v, given.cache, given.flashinfer, given.python), wanted
            )
            new = [data.Release(**each) for each in made]
        kept = [item for item in known if item.version not in wanted]
        data.write(sorted([*kept, *new], key=lambda item: Version(item.version)), given.data)
    page.write(data.load(given.data), given.output)


if __name__ == "__main__":
    main()
