"""Run the suite on all simulated GB10s, and write the table to the file of ``--output``.

With ``--certified FILE``, a healthy one is certified, and its verdict.json is stored in FILE."""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from meta_tests.fakes.gb10.catalogue import HEALTHY, SICK, TAGGED
from meta_tests.fakes.gb10.machine import BUILD, HERE, ROOT, Machine, vllm_on_the_cpu
from meta_tests.faults import catalogue_rows


def certify(target: Path) -> int:
    """Store a run and its answers, and then certify another run.

    Return 1 if the certificate is refused."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = f"--benchmark-storage=file://{folder / 'history'}"
        golden = folder / "golden.json"
        with vllm_on_the_cpu(ROOT / ".cache" / "canary" / "bf16", folder / "behind.log") as behind:
            options = {"profile": HERE / "certify.toml", "version": TAGGED}
            box = Machine(folder / "gb10", BUILD, behind, **options)
            box.build()
            levels = [f"tests/test_{name}.py" for name in ("smoke", "correctness", "performance")]
            stored = (store, "--benchmark-autosave")
            print(box.run(*levels, *stored, f"--record-golden={golden}").stdout)
            print(box.run("--certify", "--soak=60s", *stored, f"--golden={golden}").stdout)
            shutil.copy(box.report / "verdict.json", target)
            return 0 if box.verdict["certified"] else 1


def main() -> int:
    """Run all cases.

    Return 1 if a healthy machine does not pass, or a faulty one has another result than expected.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--certified", type=Path, help="where a certified one's verdict.json goes")
    options = parser.parse_args()
    status, rows = catalogue_rows.run("whole/test_gb10.py", "-n", "2", "--dist", "load")
    order = [case.name for case in (*HEALTHY, *SICK)]
    rows.sort(key=lambda row: order.index(row["name"]))
    found = {row["name"] for row in rows}
    missing = [name for name in order if name not in found]
    page = catalogue_rows.page("gb10-stand-in", found=rows, missing=missing)
    options.output.write_text(page, "utf-8")
    if options.certified is not None:
        status = certify(options.certified) or status
    return status


if __name__ == "__main__":
    sys.exit(main())
