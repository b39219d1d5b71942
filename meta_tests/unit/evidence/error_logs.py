"""The log of a ready server, and errors in it."""

from pathlib import Path

from sm121.evidence.silent_errors import ErrorReader

READY = "(APIServer pid=7) INFO:     Application startup complete."


def errors(tmp_path: Path, *lines: str, engine: str = "vllm"):
    log = tmp_path / "server.log"
    log.write_text("\n".join([READY, *lines]) + "\n", "utf-8")
    return [(each.certain, each.kind) for each in ErrorReader(engine).read(log)]
