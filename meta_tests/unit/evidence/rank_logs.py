"""The logs of two ranks on two nodes, with a change."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meta_tests.folders import DATA
from sm121.core import profile
from sm121.core.server import Endpoint, Node, Server
from sm121.run import spanning

WORDS: dict[str, Any] = tomllib.loads((DATA / "two-sparks.toml").read_text("utf-8"))

OWN = profile.load("sm121x2-gpt-oss-120b").judging("stock", "0.33.0")


def _changed(text: str, pattern: str, instead: str | dict[str, str]) -> str:
    """Return the text with the matches of a pattern replaced.

    The replacement is the first entry of the table `instead` whose key occurs in the match."""

    def one(match: re.Match[str]) -> str:
        if isinstance(instead, str):
            return match.expand(instead)
        return match.expand(next(new for key, new in instead.items() if key in match[0]))

    return re.sub(pattern, one, text, flags=re.M)


def _rank(rank: int, launcher: str) -> str:
    """Return the lines of a rank in the format of its launcher."""
    pid = 100 + rank
    host = WORDS["hosts"][rank]
    ip = WORDS["addresses"][rank]
    text = WORDS["worker"].replace("{ip}", ip)
    lines = text.replace("{rank}", str(rank)).replace("{peer}", str(1 - rank)).strip().splitlines()
    ray = f"(EngineCore pid=90) (RayWorkerWrapper pid={pid}, ip={ip}) " if launcher == "ray" else ""
    named = False
    for index, line in enumerate(lines):
        prefix = f"(Worker{f'_TP{rank}' if named else ''} pid={pid}) "
        named = named or "is assigned as" in line
        nccl = f"{host}:{pid}:{pid} [0] "
        lines[index] = ray + {"V": "" if ray else prefix, "N": nccl}[line[0]] + line[2:]
    return "\n".join(lines)


def two_logs(folder: Path, launcher: str, ranks: Any = (), change: Any = ("x", "x")) -> Server:
    """Return a server on two Sparks whose logs contain a fault in the lines of `ranks`."""
    texts = [_rank(0, launcher), _rank(1, launcher)]
    if launcher == "nnodes":
        texts[1] = WORDS["headless"].strip() + "\n" + texts[1]
    for rank, text in enumerate(texts):
        if rank in ranks:
            texts[rank] = _changed(text, *change)
    texts[0] = WORDS["head"].strip() + "\n" + texts[0]
    if launcher == "ray":
        texts = ["\n".join(texts)]
    nodes = []
    for rank, text in enumerate(texts):
        log = folder / f"node{rank}.log"
        log.write_text(text + "\n", "utf-8")
        nodes.append(Node(rank, f"spark{rank + 1}", log))
    if launcher == "ray":
        nodes.append(Node(1, "spark2"))
    return Server(
        Endpoint("http://10.0.0.1:8000", "none", "gpt-oss-120b"), False, "vllm", "0.33.0",
        nodes[0].log, None, None, reader="vllm", nodes=tuple(nodes),
    )  # fmt: skip


def require_lines(
    server: Server,
    by: str,
    *,
    wrong: Iterable[str] | None,
    silent: Iterable[str] | None,
    remarks: Iterable[str] | None,
) -> None:
    """Require one line for each pattern, each of which names a node.

    Args:
        server: The server of both logs.
        by: The launcher of its ranks: ``nnodes`` or ``ray``.
        wrong: The patterns of its faults.
        silent: The patterns of what the logs do not show.
        remarks: The patterns of the remarks.
    """
    assert OWN.nodes is not None
    judged = spanning.judge_ranks(server, OWN.nodes, OWN.path_of("stock"))
    faults = [str(fact) for fact in judged.wrong]
    _require(faults, wrong)
    _require(judged.silent, silent)
    _require(judged.remarks, remarks)
    names = ("spark1", "spark2") if by == "nnodes" else WORDS["addresses"]
    for line in [*faults, *judged.remarks]:
        assert any(node in line for node in names), line


def _require(lines: list[str], patterns: Iterable[str] | None) -> None:
    expected = list(patterns or ())
    assert len(lines) == len(expected), lines
    for pattern in expected:
        assert any(re.search(pattern, line) for line in lines), (pattern, lines)
