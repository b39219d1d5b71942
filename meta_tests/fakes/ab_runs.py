"""Write the report directory of an A/B comparison with invented numbers."""

import json
from pathlib import Path

from meta_tests.fakes import report_runs
from sm121.core.verdict import Verdict
from sm121.regression import change
from sm121.regression.ab import FILE, AbFile, Visit

#: For each metric: the unit, A's value, the ratio B / A with its interval, the verdict, and the
#: allowed change, if it is not 0.05.
_CHANGES = {
    "tg32@d0": ("tok/s", 59.3, 0.903, 0.898, 0.909, "FAIL"),
    "tg128@d0": ("tok/s", 58.9, 0.958, 0.941, 0.976, "INCONCLUSIVE"),
    "pp2048@d0": ("tok/s", 4573.0, 1.021, 1.012, 1.030, "PASS"),
    "ttft_p50": ("ms", 447.0, 0.981, 0.969, 0.993, "PASS"),
    "startup_s": ("s", 192.0, 1.07, 0.93, 1.22, "PASS", 0.25),
}
_PATH = {"attention": "FLASHINFER", "cuda_graphs": True, "kv_layout": "LBHNC", "native_fp4": None}


def ab(folder: Path, *, proven: bool = True, text: str = "--moe-backend marlin") -> Path:
    """Write an A/B comparison in which one metric is worse, one is undecided, and two pass.

    Return its folder. `text` contains the arguments that the user gave for side B.
    """
    report_runs.write("pass", folder)

    def visit(side: str, moe: str) -> Visit:
        return Visit(side, path={**_PATH, "moe": moe} if proven else {},
                     requested=[text] if side == "B" else [], log=f"server-{side}.log")  # fmt: skip

    def outcome(metric, unit, a, ratio, low, high, verdict, allowed=0.05):
        better = unit == "tok/s"
        return change.Change(
            metric, unit, better, a, a * ratio, ratio, low, high, 3, allowed, Verdict(verdict)
        )

    record = AbFile(
        sides=("", text),
        visits=[visit("A", "FLASHINFER_CUTLASS_MXFP4_MXFP8"), visit("B", "MARLIN")],
        outcomes=[outcome(metric, *row) for metric, row in _CHANGES.items()],
    )
    (folder / FILE).write_text(json.dumps(record.model_dump(mode="json")))
    return folder
