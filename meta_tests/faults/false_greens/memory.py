"""Item 16: a leak that is too small for the limit per request, but large over a day."""

import contextlib
import random
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

from meta_tests.fakes.servers import stress_server
from meta_tests.faults.stress_faults import profile_text
from meta_tests.two_steps import in_two_steps
from sm121.core import profile
from sm121.core.verdict import worst
from sm121.machine import timeline
from sm121.stress import aftermath, memory

from . import Case, Kit, Outcome
from .engine import attached_engine

_GIB = 2**30
_TESTS = ("sustained_load", "memory_does_not_grow")
#: The heap of a healthy vLLM on a CPU: MiB of growth after this many requests.
_STEPS = ((20, 12.0), (90, 6.0), (110, 3.5), (150, 8.0))


@in_two_steps
def _load(
    _kit: Kit, kept_kib: Callable[[int], float], *, per_s: int = 3, device: bool = False
) -> Outcome:
    """Judge one minute of load on a server that keeps a given amount of memory after n requests.

    `device` is memory of a GB10's device that belongs to no process."""
    noise = random.Random(1)
    samples = []
    for second in range(60):
        leaked = int(1024 * (kept_kib(per_s * second) + noise.uniform(0, 64)))
        samples.append(timeline.TimelineSample(
            at_s=float(second), completed=per_s * second, processes=1, rss_bytes=2 * _GIB,
            pss_bytes=2 * _GIB + (0 if device else leaked), handles=50,
            device_bytes=None if device else 8 * _GIB, available_bytes=100 * _GIB - leaked,
            cache_usage=None, running=None, waiting=None,
        ))  # fmt: skip
    limits = profile.load("sm121-gpt-oss-120b").stress
    growths = memory.judged(samples, limits, machine_bytes=128 * _GIB)
    verdict = worst(growth.verdict for growth in growths)
    reasons = [growth.reason for growth in growths if growth.verdict is verdict]
    return Outcome(verdict.value, "; ".join(reasons))


@in_two_steps
def _idle(_kit: Kit, blocks_in_use: float, blocks: int) -> Outcome:
    """Judge a server that keeps some blocks of its KV cache in use after its load.

    `blocks_in_use` is their number, or their share."""
    size = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1' * bool(blocks)
    page = f"vllm:kv_cache_usage_perc {blocks_in_use / (blocks or 1)}\n{size}\n"
    with mock.patch.object(aftermath, "_IDLE_WITHIN_S", 0.0):
        fault = aftermath.not_idle(SimpleNamespace(page=lambda _path: page))
    return Outcome("PASS" if fault is None else "FAIL", f"{fault}")


def _each(kib: float, most: float = float("inf")) -> Callable[[int], float]:
    return lambda requests: kib * min(requests, most)


def _heap(requests: int) -> float:
    return sum(1024 * mib for after, mib in _STEPS if requests > after)


@in_two_steps
def _attached(kit: Kit, fault: str, *, proxied: bool = False) -> Outcome:
    """Judge the memory of a server that the suite has not started."""
    folder = kit.tmp_path / f"{fault}-{proxied}"
    folder.mkdir()
    (folder / "profile.toml").write_text(profile_text({}))
    with stress_server(fault) as endpoint, contextlib.ExitStack() as servers:
        (folder / "url").write_text(url := endpoint.base_url)
        if proxied:
            proxy = attached_engine(folder / "proxy.log", "--forward", str(folder / "url"))
            url, _ = servers.enter_context(proxy)
        status, ran = kit.run_pytest(
            "--base-url", url, "--api-key", endpoint.api_key, "--served-model-name", "canary",
            "--engine", "vllm", "--profile", str(folder / "profile.toml"),
            *(f"tests/test_stress.py::test_{name}" for name in _TESTS),
            timeout_s=300, environment={"SM121_META_STEP_S": "0.005"},
        )  # fmt: skip
    file = ran.verdict
    memory = next(test for test in file["tests"] if "memory_does_not" in test["id"])
    text = "; ".join([memory["message"], *file["unproven"]])
    return Outcome(memory["verdict"], text, None if proxied else status)


CASES = [
    Case(
        item="16 A leak that a day shows",
        name="400 KiB of each request, three a second",
        fault=_load(_each(400)),
        clean=_load(_each(400, 100)),
        expected="GiB a day",
    ),
    Case(
        item="16 A leak that a day shows",
        name="40 KiB of each request, thirty a second",
        fault=_load(_each(40), per_s=30),
        clean=_load(_heap),
        expected="GiB a day",
    ),
    Case(
        item="16 A leak that a day shows",
        name="400 KiB of each request, of a device in no process",
        fault=_load(_each(400), device=True),
        clean=_load(_each(0.5), device=True),
        expected="GiB a day",
    ),
    Case(
        item="16 A leak that a day shows",
        name="1 MB of each request, of an attached server",
        fault=_attached("leak"),
        clean=_attached("none"),
        expected="bytes of the processes",
        slow=True,
    ),
    Case(
        item="16 A leak that a day shows",
        name="an open file of each request, of an attached server",
        fault=_attached("handles"),
        clean=_attached("none"),
        expected="open handles and threads",
        slow=True,
    ),
    Case(
        item="16 A leak that a day shows",
        name="a thread of each request, of an attached server",
        fault=_attached("threads"),
        clean=_attached("none"),
        expected="open handles and threads",
        slow=True,
    ),
    Case(
        item="16 A leak that a day shows",
        name="2 of 1000 blocks of the KV cache",
        fault=_idle(2, 1000),
        clean=_idle(1, 1000),
        expected="not_idle",
    ),
    Case(
        item="16 A leak that a day shows",
        name="30 of 9000 blocks of the KV cache",
        fault=_idle(30, 9000),
        clean=_idle(1, 9000),
        expected="not_idle",
    ),
    Case(
        item="16 A leak that a day shows",
        name="400 of 100000 blocks of the KV cache",
        fault=_idle(400, 100000),
        clean=_idle(1, 100000),
        expected="not_idle",
    ),
    Case(
        item="16 A leak that a day shows",
        name="0.02 of 0 blocks of the KV cache",
        fault=_idle(0.02, 0),
        clean=_idle(0, 0),
        expected="not_idle",
    ),
    Case(
        item="16 A leak that a day shows",
        name="1 MB of each request, of a server behind a proxy on this machine",
        fault=_attached("leak", proxied=True),
        clean=_attached("none"),
        expected="memory of the attached server: a proxy listens at 127.0.0.1",
        slow=True,
    ),
]
