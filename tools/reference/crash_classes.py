"""Write the page of crash classes: the meaning, the remedy and the signatures of each class."""

from sm121.evidence.failure_tables import FailureSignature, load_failures
from tools.reference.markdown import MADE_BY, cell, table

_WORDS = {
    "oom": "out of memory",
    "illegal_memory_access": "illegal memory access",
    "illegal_instruction": "illegal instruction",
    "unsupported_arch": "no code for this architecture",
    "no_kernel": "no kernel can do a layer",
    "kernel_launch": "a kernel cannot be started",
    "device_assert": "a kernel stopped itself",
    "jit_build": "a kernel could not be built",
    "xid": "the driver reports the GPU",
    "ecc": "memory that is broken",
    "nan": "not a number",
    "import_error": "an import fails",
    "checkpoint": "the checkpoint is not whole",
    "vocabulary": "harmony's vocabulary is missing",
    "hang": "nothing moves any more",
    "nccl": "the ranks cannot communicate",
    "garbage_output": "the output is garbage",
    "engine_dead": "the engine is dead",
    "port": "the port is taken",
    "config": "the configuration is refused",
    "host": "a fault of this machine",
    "unknown": "nothing that is known",
}


def page() -> str:
    """Return docs/tables/crash-classes.md."""
    by_kind: dict[str, list[FailureSignature]] = {}
    for entry in load_failures().failure:
        by_kind.setdefault(entry.kind, []).append(entry)
    lines = [
        "# Crash classes",
        "",
        MADE_BY.format(source="`fixtures/signatures/failures.toml`"),
        "Most lines of a dead server's log are consequences of one line. Among the known lines, "
        "the suite takes the earliest one of the most specific kind as the cause, and names it in "
        "`engine.path.failure` of `verdict.json` and in the report. `sm121 path LOG` "
        "reads any log.",
    ]
    for kind, entries in by_kind.items():
        lines += ["", f"## {kind}: {_WORDS.get(kind, kind)}", ""]
        rows = []
        for entry in entries:
            summary = cell(entry.summary or "the line itself")
            remedy = cell(entry.remedy or "")
            rows.append((f"`{entry.id}`", summary, cell(entry.owner), remedy))
        lines += table(("id", "meaning", "owner, and what to look at", "remedy"), rows)
    section = "../stress.md#errors-of-a-server-that-keeps-running"
    errors = f"[errors of a server that keeps running]({section})"
    lines += [
        "",
        "## Accepted errors",
        "",
        f"A healthy server also logs these lines: {errors}.",
        "",
    ]
    accepted = []
    for row in load_failures().accepted:
        accepted.append((f"`{row.id}`", row.engine, cell(row.reason), cell(row.source)))
    lines += table(("error", "engine", "why it is harmless", "source"), accepted)
    return "\n".join(lines) + "\n"
