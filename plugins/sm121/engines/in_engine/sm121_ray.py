"""Looks at the Ray cluster of this machine. Runs in the engine's interpreter, without the suite.
Reads a JSON object: ``packages`` and beginnings of ``variables``, the seconds ``within_s`` that a
node has, shared memory to ``remove``. Writes another: versions, placement groups, who holds them,
and of each node its address, resources and facts, by a task that takes no resource there."""

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


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def facts(packages: list[str], beginnings: list[str], remove: list[str]) -> dict[str, Any]:
    """Of the node that it runs on, without the segments of shared memory that are to be removed
    and that no process maps any more. Pickled whole: nothing of this file is there."""
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
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
        gpus = answer.stdout.strip().splitlines()
    lines = pathlib.Path("/proc/meminfo").read_text("ascii").splitlines()
    free = next(line for line in lines if line.startswith("MemAvailable"))
    shared = pathlib.Path("/dev/shm")  # noqa: S108 - looked at, nothing is made there
    mapped: dict[str, bool] = {}  # by file, whether an actor of Ray has it
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            is_actor = (process / "cmdline").read_bytes().startswith(b"ray::")
            maps = (process / "maps").read_text("utf-8", "replace").splitlines()
        except OSError:
            continue  # it has ended, or is another user's
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
        "available_bytes": int(free.split()[1]) * 1024,
    }


def busy(nodes: list[dict[str, Any]]) -> list[str]:
    """What tasks hold of the nodes' resources for ranks. What has ended still holds them
    for a moment."""
    free = state.available_resources_per_node()  # without those of which nothing is free
    tasks = []
    for node in nodes:
        for key in {"GPU", "sm121_rank"} & node["Resources"].keys():
            used = node["Resources"][key] - free.get(node["NodeID"], node["Resources"]).get(key, 0)
            if used > 0:
                tasks.append(f"a task with {used:g} {key} of {node['NodeManagerHostname']}")
    return tasks


def main() -> None:
    """Answers the question on standard input."""
    question = json.load(sys.stdin)
    ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    alive = [node for node in ray.nodes() if node["Alive"]]
    tasks = {
        node["NodeID"]: facts.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(question["packages"], question["variables"], question["remove"])
        for node in alive
    }
    ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=question["within_s"])
    nodes = []
    for node in alive:
        entry = {"address": node["NodeManagerAddress"], "name": node["NodeManagerHostname"]}
        entry |= {"resources": node["Resources"], "facts": None, "why": None}
        try:
            entry["facts"] = ray.get(tasks[node["NodeID"]], timeout=0.1)
        except Exception as error:  # noqa: BLE001 - whatever a node does, it is named
            entry["why"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        nodes.append(entry)
    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    actors = [a for a in state.actors().values() if a["State"] != "DEAD"]
    holders = [f"{a['ActorClassName']} (pid {a['Pid']})" for a in actors]
    if not holders and busy(alive):
        time.sleep(_RELEASED_WITHIN_S)
        holders += busy(alive)
    nodes.sort(key=lambda entry: "node:__internal_head__" not in entry["resources"])
    answer = {
        "address": ray.get_runtime_context().gcs_address,
        "ray": ray.__version__,
        "python": platform.python_version(),
        "nodes": nodes,
        "groups": [f"{g['name'] or 'unnamed'} ({g['placement_group_id'][:12]})" for g in groups],
        "holders": holders,
    }
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


main()
