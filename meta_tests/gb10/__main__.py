"""Runs the suite on all GB10s that are not there and writes the table. ``python meta_tests/gb10
--output docs/tables/gb10-stand-in.md``; with ``--certified FILE`` a healthy one is certified, and
its verdict.json is kept."""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import catalogue_rows

from gb10.catalogue import HEALTHY, SICK, TAGGED
from gb10.machine import BUILD, HERE, ROOT, Machine, vllm_on_the_cpu

HEAD = """# On a GB10 that is not there

Made by `make catalogues` (`meta_tests/gb10`). Do not edit.

The suite was made without a GB10. This is what it says of a stand-in that behaves as one: NVML with
a GB10's answers, the arguments, [choices](choices.md) and words of each release, as executed,
its log over a time line, tokens at the published rates, and a real vLLM on the CPU for the answers.
The effort's build (`mxfp4`) takes what 0.14.1's parser has with its two options more, and writes
what it wrote on a real GB10. What runs is `pytest -m sm121 --plan quick` with the profile
`sm121-gpt-oss-120b`, extended by the canary's questions and memory: 52 tok/s are asked, and another
question where "asked" is said. Starts are forty times as fast as on the machine.
The build was certified for smoke, correctness and performance (`--certified`; its
[verdict.json](../evidence/gb10-stand-in-verdict.json)). It has no kernels, and what it serves is no
GB10's: the levels kernel, stress and matrix cannot be.

What it cannot show: kernels, whether the profile's numbers are right, how long things take there.
"""


def page(found: list[dict[str, Any]]) -> str:
    """The table of what was kept of each case."""
    text = HEAD
    for healthy, title in ((True, "Healthy"), (False, "Sick")):
        text += f"\n## {title}\n\n| what | vLLM | verdict | seconds | what is said |\n"
        text += "|---|---|---|---|---|\n"
        for row in found:
            if row["healthy"] == healthy:
                text += (
                    f"| {row['name']} | {row['release']} | {row['verdict']} | {row['seconds']} | "
                    f"{catalogue_rows.cell(row['said'], 400)} |\n"
                )
    names = {row["name"] for row in found}
    if missing := [case.name for case in (*HEALTHY, *SICK) if case.name not in names]:
        text += f"\nNot run when this page was made: {', '.join(missing)}.\n"
    return text


def certify(kept: Path) -> int:
    """Store a run and its answers, then certify another; 1 when there is no certificate."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = f"--benchmark-storage=file://{folder / 'history'}"
        golden = folder / "golden.json"
        with vllm_on_the_cpu(ROOT / ".cache" / "canary" / "bf16", folder / "behind.log") as behind:
            box = Machine(
                folder / "gb10", BUILD, behind, profile=HERE / "certify.toml", version=TAGGED
            )
            box.build()
            levels = [f"tests/test_{name}.py" for name in ("smoke", "correctness", "performance")]
            box.run(*levels, store, "--benchmark-autosave", f"--record-golden={golden}")
            done = box.run("--certify", "--soak=60s", store, f"--golden={golden}")
            print(done.stdout)
            shutil.copy(box.report / "verdict.json", kept)
            return 0 if box.verdict["certified"] else 1


def main() -> int:
    """Run them; 1 when a healthy one is not green, or a sick one has not its own word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--certified", type=Path, help="where a certified one's verdict.json goes")
    options = parser.parse_args()
    status, found = catalogue_rows.run("test_gb10.py", "-n", "2", "--dist", "load")
    order = [case.name for case in (*HEALTHY, *SICK)]
    found.sort(key=lambda row: order.index(row["name"]))
    options.output.write_text(page(found), "utf-8")
    if options.certified is not None:
        status = certify(options.certified) or status
    return status


if __name__ == "__main__":
    sys.exit(main())
