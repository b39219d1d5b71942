"""Lies by pairs: which tests of smoke, correctness and stress notice which.

The honest twin runs first, and what each test asks is kept: so it is known which tests a lie would
touch. The table says how pairs are run.

    python meta_tests/lies.py --seed 1 --output docs/tables/lies.md
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]

from catalogue_rows import cell
from fault_changes import Json
from fault_exchanges import CHAT, COMPLETIONS, RESPONSES, Answer, Request
from fault_proxy import LIES, SAMPLING, Fault, FaultProxy, broken
from protocol_faults import NO_FAULT, ROOT, record_environment_once, run, vllm_serving

from sm121.checkpoint import canary

LEVELS = ("tests/test_smoke.py", "tests/test_correctness.py", "tests/test_stress.py")
PATHS = (COMPLETIONS, CHAT, RESPONSES)
SCRIPTED = ("counts the prompt", "leaves out")  # only an engine by script can be told to
_MOST = 80  # requests of a test that are kept
_ID = re.compile(r'("id": ?"(?:cmpl|chatcmpl|resp)[-_])([0-9a-f]+)')
_CREATED = re.compile(r'("created(?:_at)?": ?)([0-9]+)')
PLANTED = LIES | {n: f for n, f in SAMPLING.items() if not any(part in n for part in SCRIPTED)}


def pairs(names: Sequence[str], seed: int) -> list[tuple[str, str]]:
    """Each name in a pair; an odd one with the first."""
    drawn = sorted(names)
    random.Random(seed).shuffle(drawn)
    return list(zip(drawn[::2], [*drawn[1::2], drawn[0]], strict=False))


@dataclass
class Twin:
    """The honest run: seconds of each test that passed, and its requests with their answers."""

    seconds: dict[str, float] = field(default_factory=dict)
    exchanges: dict[str, list[tuple[str, Json, str, str]]] = field(default_factory=dict)

    def touched(self, lie: Fault) -> list[str]:
        """The tests of which it would change something, the quickest first."""
        tests = [test for test in self.seconds if self._touches(lie, test)]
        return sorted(tests, key=lambda test: ("::test_request[" in test, self.seconds[test]))

    def quick(self, lies: Sequence[Fault], seconds: float) -> list[str]:
        """Of each lie as many tests as the honest run had in so many seconds, and at least one."""
        tests: dict[str, None] = {}
        for lie in lies:
            spent = 0.0
            for test in self.touched(lie):
                if spent and spent + self.seconds[test] > seconds:
                    break
                spent += self.seconds[test]
                tests[test] = None
        return sorted(tests, key=[*self.seconds].index)

    def _touches(self, lie: Fault, test: str) -> bool:
        if lie.exchange is not None:
            return any(part in test for part in lie.among)
        return any(
            lie.request(copy.deepcopy(body)) != body or broken(lie, path, kind, content) != content
            for path, body, kind, content in self.exchanges.get(test, ())
        )


class Recording(FaultProxy):
    """Keeps what each test asks, and what it is told."""

    twin: Twin

    def answer(self, request: Request) -> Answer:
        answer = super().answer(request)
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        rows = self.twin.exchanges.setdefault(test, [])
        if request.path in PATHS and request.body and answer.status and len(rows) < _MOST:
            text = answer.content.decode() if answer.status == 200 else ""
            rows.append((request.path, request.body, answer.content_type, text))
        return answer


class Remembering(FaultProxy):
    """Gives the answer of the real server again to a request that leaves no choice, under another
    id: so a catalogue of many runs takes minutes."""

    answers: dict[str, Answer]

    def answer(self, request: Request) -> Answer:
        body = request.body or {}
        decided = body.get("temperature") == 0 or "seed" in body
        if not decided or request.path not in PATHS or body.get("store"):
            return super().answer(request)
        key = json.dumps([request.path, request.key, body | {"cache_salt": None}], sort_keys=True)
        if (stored := self.answers.get(key)) is None:
            self.answers[key] = stored = super().answer(request)
        name = uuid.uuid4().hex[:16]  # the same in each chunk of a stream
        text = _ID.sub(lambda part: part[1] + name, stored.content.decode())
        text = _CREATED.sub(lambda part: f"{part[1]}{int(time.time())}", text)
        return replace(stored, content=text.encode())


@dataclass
class Bench:
    """A real server behind two proxies. `limits`: seconds of the honest run, of whose tests a pair
    is told, and a lie that none noticed. A later run reads what is in `state`."""

    proxies: tuple[FaultProxy, FaultProxy]
    key: str
    state: Path
    limits: tuple[float, float]
    twin: Twin = field(default_factory=Twin)

    @classmethod
    @contextlib.contextmanager
    def at(cls, url: str, key: str, *arguments: Any) -> Iterator[Bench]:
        """In front of a server that runs."""
        with (
            Remembering.listening(url, NO_FAULT, key) as memory,
            FaultProxy.listening(memory.base_url, NO_FAULT) as inner,
            Recording.listening(inner.base_url, NO_FAULT) as outer,
        ):
            memory.answers = {}
            bench = cls((outer, inner), key, *arguments)
            outer.twin = bench.twin
            yield bench

    def honest(self, expression: str) -> None:
        """Run all tests without a lie; those that did not pass take no part."""
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

    def fails(self, lies: Sequence[Fault], tests: Sequence[str]) -> dict[str, str]:
        """The tests that fail against these lies together, with what they say."""
        verdicts = self._verdicts(lies, tests) if tests else []
        return {test: message for test, verdict, message, _ in verdicts if verdict == "FAIL"}

    def _verdicts(
        self, lies: Sequence[Fault], tests: Sequence[str], *options: str
    ) -> list[tuple[str, str, str, float]]:
        faults = (*lies, NO_FAULT, NO_FAULT)
        self.proxies[1].switch(faults[1])
        with tempfile.TemporaryDirectory() as report:
            outcome = run(self.proxies[0], faults[0], tests, self.key, Path(report), *options)
        assert outcome.tests, outcome.output
        return [(*test, s) for test, s in zip(outcome.tests, outcome.each_s, strict=True)]

    def pair(self, names: tuple[str, str]) -> None:
        """Run a pair, then each of both against what failed; keep a row of each."""
        began = time.monotonic()
        lies = [PLANTED[name] for name in names]
        together = self.fails(lies, tests := self.twin.quick(lies, self.limits[0]))
        touched = [self.twin.touched(lie) for lie in lies]
        for name, lie, asked, others in zip(names, lies, touched, touched[::-1], strict=True):
            alone = {t: said for t, said in together.items() if t in asked and t not in others}
            unclear = [test for test in together if test in asked and test in others]
            alone = alone or self.fails([lie], unclear)
            asked = [test for test in asked if test in tests]
            if not alone:
                asked = self.twin.quick([lie], self.limits[1])
                alone = self.fails([lie], asked)
            other = names[names[0] == name]
            row = {"lie": name, "with": other, "tests": len(asked), "fails": alone}
            with (self.state / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{time.monotonic() - began:.0f} s, {len(alone)} tests: {name}", flush=True)

    def results(self) -> dict[str, Json]:
        """The rows so far, by lie."""
        file = self.state / "rows.jsonl"
        lines = file.read_text("utf-8").splitlines() if file.is_file() else []
        return {row["lie"]: row for row in map(json.loads, lines)}


def page(rows: dict[str, Json], twin: Twin, seed: int, seconds: float) -> str:
    """The table as Markdown."""
    tests = {name: row["fails"] for name, row in rows.items()}
    unseen = [name for name in rows if not tests[name]]
    share = 100 * (1 - len(unseen) / max(len(rows), 1))
    lines = [
        "# Lies by pairs",
        "",
        f"Made by `python meta_tests/lies.py --seed {seed} --output docs/tables/lies.md` "
        "(`make catalogues`). Do not edit.",
        "",
        "Two proxies in front of the real vLLM (0.32, CPU, the canary) tell a lie each. Pairs are "
        "drawn from a seed. Of the tests of smoke, correctness and stress that a lie touches, the "
        "quickest run against both. A test that fails has noticed a lie where the other does not "
        "touch it; else it runs against each alone. A lie that nobody noticed runs alone.",
        "",
        f"**{len(rows) - len(unseen)} of {len(rows)} lies were noticed ({share:.1f} %).** Without "
        f"a lie {len(twin.seconds)} tests passed behind the proxies; only these take part. "
        f"Of {len(PLANTED)} lies {len(PLANTED) - len(rows)} were not told in this run. It took "
        f"{seconds / 60:.0f} minutes.",
        "",
        "| lie | noticed by | of tests asked | the first says | told with |",
        "|---|---|---:|---|---|",
    ]
    for name in sorted(rows):
        row, notices = rows[name], tests[name]
        short = [test.rpartition("::")[2] for test in notices]
        by = ", ".join(f"`{test}`" for test in short[:3])
        by += f" and {len(short) - 3} more" if len(short) > 3 else ""
        message = cell(next(iter(notices.values()), "-"), 150)
        cells = name, by or "**none**", str(row["tests"]), message, row["with"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Not noticed", ""]
    lines += [f"- **{name}**: {PLANTED[name].why or 'not yet known why'}." for name in unseen]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the catalogue, or some lies of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="a folder; what is in it is not run again")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the honest run, for a lie")
    parser.add_argument("--whole", type=float, default=float("inf"), help="where none noticed it")
    parser.add_argument("--only", default="", metavar="EXPRESSION", help="of the tests, as -k")
    parser.add_argument("--base-url", help="a server that runs, in place of one that is started")
    parser.add_argument("--key", default="")
    parser.add_argument("names", nargs="*", help="of lies (default: all)")
    options = parser.parse_args()
    record_environment_once()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        state = options.state or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        state.mkdir(parents=True, exist_ok=True)
        url, key = options.base_url, options.key
        if url is None:
            managed = vllm_serving(canary.build(ROOT / ".cache/canary/bf16", "bf16"), state)
            endpoint = managed.start().endpoint
            stack.callback(managed.stop)
            url, key = endpoint.base_url, endpoint.api_key
        limits = options.seconds, options.whole
        bench = stack.enter_context(Bench.at(url, key, state, limits))
        bench.honest(options.only)
        for pair in pairs(options.names or [*PLANTED], options.seed):
            if not {*pair} <= bench.results().keys():
                bench.pair(pair)
        rows = bench.results()
        options.output.write_text(
            page(rows, bench.twin, options.seed, time.monotonic() - began), "utf-8"
        )
    unseen = [name for name, row in rows.items() if not row["fails"]]
    print(f"{len(rows) - len(unseen)} of {len(rows)} noticed; not: {unseen}")
    return int(20 * len(unseen) > len(rows))


if __name__ == "__main__":
    sys.exit(main())
