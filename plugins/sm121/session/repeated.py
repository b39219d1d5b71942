"""Check a running server again and again: `sm121 run --every 10m --base-url URL`.

Each round is a run of its own, of the smoke and correctness checks of the plan `quick`; it measures
no rates, because other clients use the server too. Between two rounds the server's counters are
read, so that a minute in which speculation fails is found even if no round falls into it.
"""

import contextlib
import datetime
import json
import os
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from sm121.client import health
from sm121.core import own_tests
from sm121.core.errors import UsageError
from sm121.core.printable import printable
from sm121.core.server import NO_KEY, Endpoint, root_of
from sm121.core.verdict import Verdict
from sm121.measure import counters
from sm121.report import headline
from sm121.run import verdict_file
from sm121.stress import soak

#: What a round runs.
_ROUND = ("--plan", "quick", "-m", "smoke or correctness", "-q")
#: Options of the loop and of a round that a user may not give.
_OWN_OPTIONS = ("--plan", "-m", "--every", "--certify", "--against", "--shard")
_RECORDS = "rounds.jsonl"
#: Bytes of a file of records; it then becomes the older one of two.
_LARGEST_FILE = 8 << 20
#: Reports of red rounds that are kept: the first, and the newest.
_RED_REPORTS = 10
_SAMPLE_EVERY_S = 10.0
#: Speculation's acceptance is judged over windows of this length, if they have enough drafts.
_WINDOW_S = 60.0
_LEAST_DRAFT_TOKENS = 200
#: A window below this share of the median of the windows before it is red.
_LEAST_SHARE = 0.5
_WINDOWS_NEEDED = 5
_WINDOWS_KEPT = 1000
#: A round begins with one token, which has so many seconds.
_TOKEN_WITHIN_S = 10.0


@dataclass(frozen=True)
class Round:
    """One round, as `rounds.jsonl` has it.

    Attributes:
        number: From 1.
        started: When it began, in ISO 8601.
        seconds: How long it took.
        verdict: The verdict of its run, or of the time before it.
        sentence: One line for a person.
        acceptance: The lowest share of accepted draft tokens of a minute since the round before it.
            None: no minute had enough drafts.
        report: The folder of its report, if it was kept.
    """

    number: int
    started: str
    seconds: float
    verdict: Verdict
    sentence: str
    acceptance: float | None = None
    report: str | None = None

    @property
    def is_red(self) -> bool:
        """Whether the round shows a deviation."""
        return self.verdict is not Verdict.PASS


class Acceptance:
    """Speculation's acceptance over windows of a minute, from the server's counters."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, counters.Counters]] = deque()
        self._windows: deque[float] = deque(maxlen=_WINDOWS_KEPT)
        self._lowest: float | None = None
        self._deviation: str | None = None

    def take(self, at_s: float, now: counters.Counters | None) -> None:
        """Add a reading of the counters.

        Args:
            at_s: When it was read, by a monotonic clock.
            now: The reading. None, or counters that fell: the windows begin anew.
        """
        if now is None or (self._samples and _fell(self._samples[-1][1], now)):
            self._samples.clear()
        if now is None:
            return
        self._samples.append((at_s, now))
        if at_s - self._samples[0][0] < _WINDOW_S:
            return
        delta = now.since(self._samples.popleft()[1])
        drafted = delta.get("draft_tokens", 0.0)
        if drafted >= _LEAST_DRAFT_TOKENS:
            self._add_window(delta.get("accepted_tokens", 0.0) / drafted)
            self._samples.clear()
            self._samples.append((at_s, now))

    def _add_window(self, share: float) -> None:
        if self._lowest is None or share < self._lowest:
            self._lowest = share
        if len(self._windows) >= _WINDOWS_NEEDED:
            usual = statistics.median(self._windows)
            if share < _LEAST_SHARE * usual and self._deviation is None:
                self._deviation = (
                    f"acceptance of draft tokens: expected at least {_LEAST_SHARE * usual:.0%} "
                    f"(half of the usual {usual:.0%}), got {share:.0%} for a minute"
                )
        self._windows.append(share)

    def taken(self) -> tuple[float | None, str | None]:
        """Return the lowest share since the last call, and the deviation in words, if any."""
        result = self._lowest, self._deviation
        self._lowest = self._deviation = None
        return result


def _fell(before: counters.Counters, now: counters.Counters) -> bool:
    """Whether the server was started again between two readings."""
    name = "draft_tokens"
    return now.values.get(name, 0.0) < before.values.get(name, 0.0)


class Records:
    """The files of the rounds: one line each, and the reports of red ones; both bounded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reports: list[Path] = []
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, played: Round, report: Path | None) -> Round:
        """Write a round's line. Keep its report if the round is red.

        Args:
            played: The round.
            report: The folder of its report, which the next round replaces.

        Returns:
            The round, with the place of its report.
        """
        if played.is_red and report is not None and report.is_dir():
            kept = self._folder / f"red-{played.number}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(report, kept, symlinks=True)
            played = replace(played, report=str(kept))
            self._reports.append(kept)
            if len(self._reports) > _RED_REPORTS:
                shutil.rmtree(self._reports.pop(1), ignore_errors=True)
        file = self._folder / _RECORDS
        if file.is_file() and file.stat().st_size > _LARGEST_FILE:
            file.replace(file.with_suffix(".1.jsonl"))
        record = asdict(played) | {"verdict": played.verdict.value}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
        return played


def repeat(
    every_s: float,
    play: Callable[[int], tuple[Round, Path | None]],
    records: Records,
    say: Callable[[str], None],
    *,
    stopped: threading.Event,
) -> int:
    """Play rounds until a signal comes.

    Args:
        every_s: Seconds from the beginning of one round to that of the next.
        play: Plays the round of a number; returns it and the folder of its report.
        records: Where the rounds are kept.
        say: Prints one line.
        stopped: Set by a signal: no other round begins.

    Returns:
        0 if every round was green, else 1; 5 if no round ended.
    """
    number = 0
    red = 0
    while not stopped.is_set():
        began = time.monotonic()
        number += 1
        played, report = play(number)
        if stopped.is_set() and played.verdict is Verdict.NOT_RUN:
            number -= 1
            break  # the signal ended this round
        played = records.keep(played, report)
        if played.is_red:
            red += 1
        say(line_of(played))
        stopped.wait(max(0.0, every_s - (time.monotonic() - began)))
    say(f"stopped after {number} rounds: {number - red} green, {red} red")
    if number == 0:
        return 5
    return 1 if red else 0


def line_of(played: Round) -> str:
    """Return the line that is printed of a round."""
    acceptance = ""
    if played.acceptance is not None:
        acceptance = f"; acceptance at least {played.acceptance:.0%}"
    mark = "RED " if played.is_red else ""
    report = f"; report: {played.report}" if played.report else ""
    return (
        f"{mark}round {played.number}: {printable(played.sentence)} "
        f"({played.seconds:.0f} s{acceptance}{report})"
    )


def run(every: str, words: Sequence[str], say: Callable[[str], None]) -> int:
    """Check a running server again and again, until SIGINT or SIGTERM.

    Args:
        every: The time from one round to the next, as in 10m.
        words: The other arguments of `sm121 run`; --base-url is among them.
        say: Prints one line.

    Returns:
        The exit status, as of `repeat`.

    Raises:
        UsageError: An argument is wrong, or missing.
    """
    every_s = soak.parse_duration(every, "--every")
    given = {word.partition("=")[0] for word in words}
    for option in _OWN_OPTIONS:
        if option in given:
            raise UsageError(f"--every and {option}: expected one of them")
    url = _value(words, "--base-url")
    if url is None:
        raise UsageError("--every: expected --base-url URL too. It checks a running server")
    folder = Path(_value(words, "--report-dir") or "conformance-report").absolute()
    endpoint = Endpoint(root_of(url, "--base-url"), _key(words), "")
    player = _Player(list(words), folder, endpoint)
    with _signals(player):
        return repeat(every_s, player.play, Records(folder), say, stopped=player.stopped)


class _Player:
    """Runs the suite once a round, and reads the counters all the time."""

    def __init__(self, words: list[str], folder: Path, endpoint: Endpoint) -> None:
        self._words = words
        self._report = folder / "latest"
        self._log = folder / "round.log"  # a report directory has nothing but the report
        self._endpoint = endpoint
        self._acceptance = Acceptance()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.stopped = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def play(self, number: int) -> tuple[Round, Path]:
        """Play one round."""
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        began = time.monotonic()
        verdict, sentence = self._run()
        with self._lock:
            lowest, deviation = self._acceptance.taken()
        if deviation is not None and verdict is Verdict.PASS:
            verdict, sentence = Verdict.FAIL, f"FAIL: {deviation}"
        seconds = time.monotonic() - began
        return Round(number, started, seconds, verdict, sentence, lowest), self._report

    def stop(self) -> None:
        """End the round that runs, and begin no other."""
        self.stopped.set()
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)

    def _run(self) -> tuple[Verdict, str]:
        shutil.rmtree(self._report, ignore_errors=True)
        key = self._endpoint.api_key if self._endpoint.asks_for_a_key else None
        probe = health.check(
            self._endpoint.base_url, within_s=_TOKEN_WITHIN_S, api_key=key, model=None
        )
        if not probe.healthy:  # the suite's own requests would wait for a stalled server
            return Verdict.FAIL, f"FAIL: {probe.message}"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        words = [*_without(self._words, "--report-dir"), *_ROUND, f"--report-dir={self._report}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                own_tests.command(words, Path.cwd()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches it once, through `stop`
            )
            if self.stopped.is_set():
                self.stop()
            status = self._process.wait()
            self._process = None
        try:
            run = verdict_file.read(self._report / "verdict.json")
        except (OSError, ValueError):
            last = _last_line(self._log)
            return Verdict.NOT_RUN, f"NOT_RUN: no verdict (exit status {status}): {last}"
        if not run.finished:
            return Verdict.NOT_RUN, f"NOT_RUN: the run did not end (exit status {status})"
        return run.verdict, str(headline.of(run))

    def _sample(self) -> None:
        while not self.stopped.wait(_SAMPLE_EVERY_S):
            now = counters.fetch(self._endpoint)
            with self._lock:
                self._acceptance.take(time.monotonic(), now)


@contextlib.contextmanager
def _signals(player: _Player) -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None:
        player.stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _value(words: Sequence[str], option: str) -> str | None:
    """Return the value of an option in the words of a command line; the last one counts."""
    value = None
    for number, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name == option:
            if equals:
                value = text
            elif number + 1 < len(words):
                value = words[number + 1]
    return value


def _without(words: Sequence[str], option: str) -> list[str]:
    """Return the words without an option and its value."""
    kept: list[str] = []
    skips = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skips:
            skips = False
        elif name == option:
            skips = not equals
        else:
            kept.append(word)
    return kept


def _key(words: Sequence[str]) -> str:
    file = _value(words, "--api-key-file")
    if file is not None:
        return Path(file).read_text("utf-8").strip()
    variables = (os.environ.get(name) for name in ("SM121_API_KEY", "OPENAI_API_KEY"))
    return _value(words, "--api-key") or next(filter(None, variables), NO_KEY)


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
