"""Item 17: a server with speculative decoding whose rate, timestamps or counters are wrong."""

import tomllib
from typing import Any

from meta_tests.folders import DATA
from meta_tests.two_steps import in_two_steps

from . import Case, Kit, Outcome
from .clock import ABOVE, BELOW, Ask, judged

TEXT = "17 A rate on text that nobody writes"
LIES = "17 A clock of a server that drafts"
#: The number of accepted tokens varies between steps and texts. Even the slowest text is above the
#: gate.
DRAFTS = ("--steps", "2135312411", "--accepted-length", "2.3")
HIGH = 1.07 * ABOVE
ROWS = tomllib.loads((DATA / "drafting-lies.toml").read_text("utf-8"))


@in_two_steps
def level(kit: Kit, *options: str) -> Outcome:
    """Run the test of tg32@d0 on an attached server, with the gate of 52 tok/s of the shipped
    profile."""
    server = kit.timed_server("--prefill-rate", "40000", *DRAFTS, *options)
    status, run = kit.run_pytest(
        "tests/test_performance.py", "--arch", "sm121", "--base-url", server.base_url,
        "--depths", "0", "-k", "decode_rate and tg32", timeout_s=240.0,
    )  # fmt: skip
    shares = {name: each["acceptance_rate"] for name, each in run.verdict["metrics"].items()}
    text = f"accepted {'beside each rate' if shares and all(shares.values()) else shares}"
    return Outcome(run.verdict["verdict"], f"{text}; {run.output}", status)


def planted(name: str, row: dict[str, Any]) -> Case:
    natural = bool(row.get("uncounted"))
    more = tuple(row.get("options", ()))
    served = (*DRAFTS, "--trap", "no-metrics") if natural else DRAFTS

    def rated(rate: float, *options: str) -> Ask:
        return judged(*served, *options, rate=rate, tokens=32, natural=natural)

    if row.get("random"):
        fault = rated(BELOW, "--random-faster", "2", *more)
        return Case(TEXT, name, fault, rated(HIGH, *more), row["expected"], slow=True)
    return Case(LIES, name, rated(HIGH, *more), rated(HIGH), row["expected"], slow=True)


CASES = [
    Case(
        item=TEXT,
        name="106.9 tok/s on random tokens, 44.4 on any text",
        fault=level("--rate", "44.4", "--random-faster", "2.4"),
        clean=level("--rate", "60", "--random-faster", "1.8"),
        expected="accepted beside each rate",
        slow=True,
    ),
    Case(
        item=TEXT,
        name="counters of drafts that are there after the first request alone",
        fault=judged("--trap", "drafts-show-late", rate=HIGH, tokens=32),
        clean=judged("--steps", "2135312411", "--accepted-length", "2.3", rate=HIGH, tokens=32),
        expected="drafted_random_tokens",
    ),
    *(planted(name, row) for name, row in ROWS.items()),
]
