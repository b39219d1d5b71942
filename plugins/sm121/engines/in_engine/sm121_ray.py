"""Read the state of the Ray cluster of this machine.

This script runs in the engine's interpreter, without the suite. It reads a JSON object from
standard input, with the names of ``packages``, the prefixes of ``variables``, the timeout
``within_s`` of a node in seconds, and the shared memory to ``remove``. It writes a JSON object with
the versions, the placement groups with their owners, and the address, resources and facts of each
node. A Ray task that takes no resource collects the facts of a node.
"""

import json
import os
import platform
import sys
import time
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray._private import state
from ray.util import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_RELEASED_WITHIN_S = 2.0


def nccl_of_actors() -> list[dict[str, str | None]]:
    """Return the path and the digest of each libnccl.so that Ray's actors mapped on this node."""
    import hashlib
    import pathlib
    import re

    pattern = re.compile(r"\S+ \S+ \S+ \S+ (\d+) +(/.*/libnccl\.so[.\d]*)(?: \(deleted\))?")
    # The keys are the inode and the path in the actor.
    files: dict[tuple[str, str], pathlib.Path] = {}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if not (process / "cmdline").read_bytes().startswith(b"ray::"):
                continue
            maps = (process / "maps").read_text("utf-8", "replace").splitlines()
        except OSError:
            continue  # the process has ended, or belongs to another user
        for line in maps:
            match = pattern.fullmatch(line)
            if match is not None:
                files[match[2], match[1]] = process / "root" / match[2].lstrip("/")
    rows: list[dict[str, str | None]] = []
    for (path, inode), file in files.items():
        sha256 = None  # the path now leads to another file, or the actor has ended
        try:
            if str(file.stat().st_ino) == inode:
                digest = hashlib.sha256()  # file_digest is not in Python 3.10
                with file.open("rb") as stream:
                    # Read in blocks, because a library has 400 MB.
                    while block := stream.read(1 << 20):
                        digest.update(block)
                sha256 = digest.hexdigest()
        except OSError:
            pass
        rows.append({"path": path, "sha256": sha256})
    return rows


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def facts(packages: list[str], beginnings: list[str], remove: list[str]) -> dict[str, Any]:
    """Remove shared memory of the node on which this function runs, and return the node's facts.

    Ray pickles this function with the functions that it calls. Nothing else of this file exists on
    the node.

    Args:
        packages: The packages whose versions to return.
        beginnings: Prefixes of the environment variables to return.
        remove: Segments of shared memory to remove, unless a process still maps them.
    """
    import importlib.metadata
    import os
    import pathlib
    import platform
    import shutil
    import socket
    import subprocess

    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpus: list[str] = []
    tool = shutil.which("nvidia-smi")
    if tool:
        query = [tool, "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
        gpus = answer.stdout.strip().splitlines()
    lines = pathlib.Path("/proc/meminfo").read_text("ascii").splitlines()
    free = next(line for line in lines if line.startswith("MemAvailable"))
    shared = pathlib.Path("/dev/shm")  # noqa: S108 - only read, nothing is created there
    mapped: dict[str, bool] = {}  # for each file, whether one of Ray's actors maps it
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            is_actor = (process / "cmdline").read_bytes().startswith(b"ray::")
            maps = (process / "maps").read_text("utf-8", "replace").splitlines()
        except OSError:
            continue  # the process has ended, or belongs to another user
        for line in maps:
            file = line.partition(f"{shared}/")[2]
            if file.startswith("psm_") or "-cpushm_" in file:
                mapped[file] = mapped.get(file, False) or is_actor
    for file in {*remove} - {*mapped}:
        (shared / file).unlink(missing_ok=True)
    chosen = {n: v for n, v in os.environ.items() if n.startswith(tuple(beginnings))}
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": versions,
        "variables": chosen,
        "gpus": gpus,
        "segments": [file for file, of_ray in mapped.items() if of_ray],
        "nccl": nccl_of_actors(),
        "available_bytes": int(free.split()[1]) * 1024,
    }


def busy(nodes: list[dict[str, Any]]) -> list[str]:
    """Return one line for each ``GPU`` or ``sm121_rank`` resource of a node that is still in use.

    A Ray task holds its resources until a moment after its end.

    Args:
        nodes: The living nodes, of ``ray.nodes``.
    """
    free = state.available_resources_per_node()  # Nodes without any free resource are missing here.
    tasks = []
    for node in nodes:
        for key in {"GPU", "sm121_rank"} & node["Resources"].keys():
            used = node["Resources"][key] - free.get(node["NodeID"], node["Resources"]).get(key, 0)
            if used > 0:
                tasks.append(f"a task with {used:g} {key} of {node['NodeManagerHostname']}")
    return tasks


def main() -> None:
    """Read the request from standard input, and write the answer to standard output."""
    question = json.load(sys.stdin)
    ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    alive = [node for node in ray.nodes() if node["Alive"]]
    tasks = {}
    for node in alive:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        on_node = facts.options(scheduling_strategy=strategy)
        tasks[node["NodeID"]] = on_node.remote(
            question["packages"], question["variables"], question["remove"]
        )
    ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=question["within_s"])
    nodes = []
    for node in alive:
        entry = {
            "address": node["NodeManagerAddress"],
            "name": node["NodeManagerHostname"],
            "resources": node["Resources"],
            "facts": None,
            "why": None,
        }
        try:
            entry["facts"] = ray.get(tasks[node["NodeID"]], timeout=0.1)
        except Exception as error:  # noqa: BLE001 - the report names the node and its error
            entry["why"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        nodes.append(entry)
    groups = []
    for group in placement_group_table().values():
        if group["state"] != "REMOVED":
            groups.append(f"{group['name'] or 'unnamed'} ({group['placement_group_id'][:12]})")
    holders = []
    for actor in state.actors().values():
        if actor["State"] != "DEAD":
            holders.append(f"{actor['ActorClassName']} (pid {actor['Pid']})")
    if not holders and busy(alive):
        time.sleep(_RELEASED_WITHIN_S)
        holders += busy(alive)
    nodes.sort(key=lambda entry: "node:__internal_head__" not in entry["resources"])
    answer = {
        "address": ray.get_runtime_context().gcs_address,
        "ray": ray.__version__,
        "python": platform.python_version(),
        "nodes": nodes,
        "groups": groups,
        "holders": holders,
    }
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


main()
