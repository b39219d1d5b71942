"""Inject faults in pairs, and find out which tests of smoke, correctness and stress detect which
fault.

All tests first run without a fault, and the requests of each test are stored, so that it is known
which tests a fault can affect. The table describes how pairs are run.

    python -m meta_tests.faults.lies --seed 1 --output docs/tables/lies.md
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from meta_tests.fakes.fault_proxy import LIES, SAMPLING, Fault, FaultProxy, broken
from meta_tests.faults import catalogue_rows
from meta_tests.faults.fault_changes import Json
from meta_tests.faults.fault_exchanges import CHAT, COMPLETIONS, RESPONSES, Answer, Request
from meta_tests.faults.protocol_faults import (
    NO_FAULT,
    ROOT,
    record_environment_once,
    run,
    vllm_serving,
)
from sm121.checkpoint import canary
from sm121.core import profile

LEVELS = ("tests/test_smoke.py", "tests/test_correctness.py", "tests/test_stress.py")
PATHS = (COMPLETIONS, CHAT, RESPONSES)
SCRIPTED = ("counts the prompt", "leaves out")  # only a scripted engine can show this
_MOST = 80  # how many requests of a test are stored
_TOGETHER_S = 0.5  # the time between a crowd's answer and its repetition
#: Ids that a server creates anew for each answer, and the times of answers.
_ID = re.compile(r'("(?:id|item_id|call_id|response_id)": ?"[a-z]+(?:-tool)?[-_])([0-9a-f]{6,})')
_CREATED = re.compile(r'("created(?:_at)?": ?)([0-9]+)')
PLANTED = LIES | {n: f for n, f in SAMPLING.items() if not any(part in n for part in SCRIPTED)}


def pairs(names: Sequence[str], seed: int) -> list[tuple[str, str]]:
    """Return the names in pairs. If their number is odd, the last one is paired with the first."""
    drawn = sorted(names)
    random.Random(seed).shuffle(drawn)
    return list(zip(drawn[::2], [*drawn[1::2], drawn[0]], strict=False))


@dataclass
class Twin:
    """The run without a fault: the duration of each passed test, and its requests with their
    answers."""

    seconds: dict[str, float] = field(default_factory=dict)
    exchanges: dict[str, list[tuple[str, Json, str, str]]] = field(default_factory=dict)

    def touched(self, lie: Fault) -> list[str]:
        """Return the tests that the fault can affect: first the test that its row names, then the
        quickest ones."""

        def rank(test: str) -> tuple[bool, float]:
            is_named = f"{test}[".partition("::")[2].startswith(lie.caught_by or "::")
            return not is_named, self.seconds[test]

        return sorted((test for test in self.seconds if self._touches(lie, test)), key=rank)

    def within(self, tests: Sequence[str], seconds: float) -> list[str]:
        """Return the first tests, as many as ran in the given number of seconds without a fault; at
        least one."""
        spent = [*itertools.accumulate(self.seconds[test] for test in tests)]
        return [t for t, s in zip(tests, spent, strict=True) if t == tests[0] or s <= seconds]

    def _touches(self, lie: Fault, test: str) -> bool:
        if lie.exchange is not None:
            return any(part in test for part in lie.among)
        return any(
            lie.request(copy.deepcopy(body)) != body or broken(lie, path, kind, content) != content
            for path, body, kind, content in self.exchanges.get(test, ())
        )


class Remembering(FaultProxy):
    """Repeats the real server's answer to a request that has only one right answer, under new ids.

    A catalogue of many runs thus takes minutes. Of the stress level, only crowds are repeated. The
    tests of the prefix cache reach the server each time, because they require a cache hit."""

    answers: dict[str, Answer]

    def _ask(self, request: Request) -> Answer:
        body = request.body or {}
        sure = body.get("top_k") == 1 or body.get("min_p") == 1 or body.get("top_p", 1) < 1e-5
        decided = sure or body.get("temperature") == 0 or "seed" in body
        crowded = "test_crowd" in _test()
        fresh = ("stress" in _test() and not crowded) or "prefix_cache" in _test()
        if not decided or request.path not in PATHS or body.get("store") or fresh:
            return super()._ask(request)
        key = json.dumps([request.path, request.key, body | {"cache_salt": None}], sort_keys=True)
        if (stored := self.answers.get(key)) is None:
            self.answers[key] = stored = super()._ask(request)
        elif crowded:
            time.sleep(_TOGETHER_S)
        # The id is the same in each chunk.
        new = functools.cache(lambda _old: uuid.uuid4().hex[:16])
        text = _ID.sub(lambda part: part[1] + new(part[2]), stored.content.decode())
        text = _CREATED.sub(lambda part: f"{part[1]}{int(time.time())}", text)
        return replace(stored, content=text.encode())


class Recording(FaultProxy):
    """Forwards requests to another proxy, and stores the requests and answers of each test."""

    inner: FaultProxy
    twin: Twin

    def answer(self, request: Request) -> Answer:
        answer = super().answer(request)
        rows = self.twin.exchanges.setdefault(_test(), [])
        if request.path in PATHS and request.body and answer.status and len(rows) < _MOST:
            text = answer.content.decode() if answer.status == 200 else ""
            rows.append((request.path, request.body, answer.content_type, text))
        return answer

    def _ask(self, request: Request) -> Answer:
        return self.inner.answer(request)


def _test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


@dataclass
class Bench:
    """A real server behind two proxies.

    `limits` are two numbers of seconds: how long the tests of a pair of faults may take, and after
    how long a fault that no test has detected is given up. A test counts with its duration in the
    run without a fault. `part` contains the tests that take part, and `options` the options of each
    run. A later run continues from `state`."""

    proxies: tuple[FaultProxy, FaultProxy]
    key: str
    state: Path
    where: str
    limits: tuple[float, float]
    part: Callable[[str], bool]
    options: tuple[str, ...]
    twin: Twin = field(default_factory=Twin)

    @classmethod
    @contextlib.contextmanager
    def at(cls, url: str, key: str, *arguments: Any) -> Iterator[Bench]:
        """Start the two proxies in front of a running server; stop them at the end."""
        limits = httpx.Limits(max_connections=None)
        with (
            httpx.Client(timeout=300.0, trust_env=False, limits=limits) as http,
            Recording.listening(url, NO_FAULT) as outer,
        ):
            outer.inner = inner = Remembering(url, NO_FAULT, key, http)
            inner.answers = {}
            bench = cls((outer, inner), key, *arguments)
            outer.twin = bench.twin
            yield bench

    def honest(self, expression: str) -> None:
        """Run all tests without a fault. Tests that do not pass take no part."""
        file = self.state / "twin.json"
        if file.is_file():
            for name, values in json.loads(file.read_text("utf-8")).items():
                getattr(self.twin, name).update(values)
            return
        for test, verdict, message, seconds in self._verdicts((), LEVELS, "-k", expression):
            if verdict == "PASS":
                self.twin.seconds[test] = seconds
            elif verdict != "NOT_RUN":
                print(f"WITHOUT A LIE {verdict}: {test}: {message}", flush=True)
        file.write_text(json.dumps(vars(self.twin)), "utf-8")

    def fails(self, lies: Sequence[Fault], tests: Sequence[str], *options: str) -> dict[str, str]:
        """Return the tests that fail with these faults and not without them, with their
        messages."""
        verdicts = self._verdicts(lies, tests, *options) if tests else []
        failed = {test: message for test, verdict, message, _ in verdicts if verdict == "FAIL"}
        honest = self._verdicts((), [*failed]) if failed else []
        return {test: failed[test] for test, verdict, _, _ in honest if verdict == "PASS"}

    def _verdicts(
        self, lies: Sequence[Fault], tests: Sequence[str], *options: str
    ) -> list[tuple[str, str, str, float]]:
        faults = (*lies, NO_FAULT, NO_FAULT)
        self.proxies[1].switch(faults[1])
        with tempfile.TemporaryDirectory() as report:
            options = *self.options, *options
            outcome = run(self.proxies[0], faults[0], tests, self.key, Path(report), *options)
        assert outcome.tests, outcome.output
        names = [fault.name for fault in lies]
        assert not outcome.proxy_error, f"the proxy of {names} failed: {outcome.proxy_error}"
        return [(*test, s) for test, s in zip(outcome.tests, outcome.each_s, strict=True)]

    def pair(self, names: tuple[str, str]) -> None:
        """Run a pair, then each of both faults with the failed tests, and then with other tests
        until one detects it.

        A row for each fault is stored."""
        began = time.monotonic()
        before = self.results()
        lies = [PLANTED[name] for name in names]
        touched = [[*filter(self.part, self.twin.touched(lie))] for lie in lies]
        new = [name not in before for name in names]
        first = []
        for tests, is_new in zip(touched, new, strict=True):
            if is_new:
                first.extend(self.twin.within(tests, self.limits[0]))
        together = self.fails(lies, [*dict.fromkeys(first)])
        for name, lie, tests, others in zip(names, lies, touched, touched[::-1], strict=True):
            row = before.get(name, {"lie": name, "with": [*names][name == names[0]], "asked": []})
            row["where"] = self.where
            if name in before and self.done(row, tests):
                continue
            alone = {}
            unclear = []
            for test, text in together.items():
                if test in tests and test in others:
                    unclear.append(test)
                elif test in tests:
                    alone[test] = text
            # Two faults may cancel each other out. Tests that passed with both faults therefore run
            # again with one.
            held = {test for test in first if test in others and test not in together}
            asked = {*row["asked"], *first} - held
            row["asked"] = [test for test in tests if test in asked]
            row["fails"] = alone or self.fails([lie], unclear)
            self._until_noticed(lie, tests, row)
            with (self.state / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            seconds = time.monotonic() - began
            print(
                f"{seconds:.0f} s, {len(row['fails'])} of {len(row['asked'])}: {name}", flush=True
            )

    def _until_noticed(self, lie: Fault, tests: Sequence[str], row: Json) -> None:
        """Run the remaining tests, the quickest first.

        Each selection may take as long as all earlier ones together."""
        while not self.done(row, tests):
            spent = sum(self.twin.seconds[test] for test in row["asked"])
            rest = [test for test in tests if test not in row["asked"]]
            more = self.twin.within(rest, max(spent, self.limits[0]))
            row["asked"] += more
            row["fails"] = self.fails([lie], more, "--maxfail=1")

    def done(self, row: Json, tests: Sequence[str]) -> bool:
        """Return whether a fault was detected, or all allowed tests have run."""
        rest = [test for test in tests if test not in row["asked"]]
        spent = sum(self.twin.seconds[test] for test in row["asked"])
        return bool(row.get("fails") or not rest or spent > self.limits[1])

    def results(self) -> dict[str, Json]:
        """Return the rows so far; the keys are faults. Another process may be writing a row."""
        file = self.state / "rows.jsonl"
        text = file.read_text("utf-8") if file.is_file() else ""
        lines = text.rpartition("\n")[0].splitlines()
        return {row["lie"]: {"where": self.where} | row for row in map(json.loads, lines)}


def merged(folders: Sequence[Path]) -> dict[str, Json]:
    """Return the rows of several state files; the keys are faults.

    The last row in which the fault was detected counts; if there is none, the last row."""
    rows: dict[str, Json] = {}
    for folder in folders:
        for line in (folder / "rows.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            if row["fails"] or not rows.get(row["lie"], {}).get("fails"):
                rows[row["lie"]] = row
    return rows


def page(rows: dict[str, Json], seed: int) -> str:
    """Return the table in Markdown."""
    unseen = [name for name, row in rows.items() if not row["fails"]]
    return catalogue_rows.page("lies", rows=rows, unseen=unseen, planted=PLANTED, seed=seed)


def main() -> int:
    """Run all faults, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="a folder; what is in it is not run again")
    parser.add_argument("--seconds", type=float, default=2.0, help="of the honest run, for a lie")
    parser.add_argument("--whole", type=float, default=float("inf"), help="where none detected it")
    parser.add_argument("--processes", type=int, default=1, help="at once, but for stress")
    parser.add_argument("--part", type=int, help="of the processes; the stress level left out")
    parser.add_argument("--profile", default="cpu-tiny-gpt-oss", help="that fits the server")
    parser.add_argument(
        "--where", default="vLLM 0.32, CPU", help="what the server is, for the page"
    )
    parser.add_argument("--merge", type=Path, nargs="+", help="only the page, of these states")
    parser.add_argument("--only", default="", metavar="EXPRESSION", help="of the tests, as -k")
    parser.add_argument("--base-url", help="a server that runs, in place of one that is started")
    parser.add_argument("--key", default="")
    parser.add_argument("names", nargs="*", help="of lies (default: all)")
    options = parser.parse_args()
    if options.merge:
        options.output.write_text(page(merged(options.merge), options.seed), "utf-8")
        return 0
    record_environment_once()
    with contextlib.ExitStack() as stack:
        state = options.state or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        state.mkdir(parents=True, exist_ok=True)
        url = options.base_url
        key = options.key
        if url is None:
            managed = vllm_serving(canary.build(ROOT / ".cache/canary/bf16", "bf16"), state)
            endpoint = managed.start().endpoint
            stack.callback(managed.stop)
            url = endpoint.base_url
            key = endpoint.api_key
        limits = (options.seconds, options.whole)
        part = options.part
        quiet: Callable[[str], bool] = lambda test: part is None or "stress" not in test  # noqa: E731
        chosen = "--profile", options.profile, "--arch", profile.load(options.profile).arch
        bench = stack.enter_context(Bench.at(url, key, state, options.where, limits, quiet, chosen))
        bench.honest(options.only)
        drawn = pairs(options.names or [*PLANTED], options.seed)
        if part is not None:
            drawn = drawn[part :: options.processes]
        elif options.processes > 1:
            again = [sys.executable, *sys.argv, f"--state={state}", f"--base-url={url}"]
            parts = [
                subprocess.Popen([*again, f"--key={key}", f"--part={number}"])
                for number in range(options.processes)
            ]
            _ = [process.wait() for process in parts]  # a worker that died is reported below
        for pair in drawn:
            bench.pair(pair)
        rows = bench.results()
        if part is None:
            options.output.write_text(page(rows, options.seed), "utf-8")
    unseen = [name for name, row in rows.items() if not row["fails"]]
    print(f"{len(rows) - len(unseen)} of {len(rows)} detected; not: {unseen}")
    return int(20 * len(unseen) > len(rows))


if __name__ == "__main__":
    sys.exit(main())
