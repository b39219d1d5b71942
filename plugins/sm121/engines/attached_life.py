"""Whether an attached server is still the process that was attached to."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from sm121.core.server import Server
from sm121.engines.attached import CLOCK_SLACK_S, json_in, json_of
from sm121.engines.life import Alive, Dead
from sm121.evidence import metrics
from sm121.evidence.failure import Cause

#: vLLM and others call a model "created" at the moment of the question.
_TWO_QUESTIONS_S = 1.2
#: How long a server that does not answer is asked again before it is called gone.
_GONE_AFTER_S = 5.0


@dataclass(frozen=True)
class _Sign:
    """What differs between two processes. Null and empty where the server does not say."""

    started: float | None = None
    version: str | None = None
    created: int | None = None
    counters: dict[str, float] = field(default_factory=dict)


class AttachedLife:
    """The life of a server that somebody else has started: `sm121.engines.life.Life`. It has died
    where it is gone, and where another process has taken its place; then that one's life is looked
    at. Two processes differ in their start and their counters (``/metrics``), in their version, and
    in the time at which their model was created, where that stands still."""

    def __init__(self, server: Server) -> None:
        self.accounted = False
        self._endpoint, self._log = server.endpoint, server.log
        self._created_stands = False
        with self._endpoint.http(timeout_s=10.0) as http:
            self._named = self._own(json_of(http, "/v1/models")) is not None
        self._first = self._read()
        if self._first.started is None and self._first.created is not None:
            time.sleep(_TWO_QUESTIONS_S)
            self._created_stands = self._read().created == self._first.created
        self._last, self._asked_at = self._first, time.monotonic()
        self._silent = False
        self._dead: Dead | None = None

    def state(self, *, asked_within_s: float = 0.0) -> Alive | Dead:
        """A death stands until it is accounted for; after that, whether the next one lives."""
        reported = self._dead is None or self.accounted
        if reported and time.monotonic() - self._asked_at >= asked_within_s:
            silence, was_silent = self._silence(), self._silent
            self._silent, self._asked_at = silence is not None, time.monotonic()
            if silence is None or not was_silent:
                sign = silence or self._change()
                self._dead, self.accounted = self._died(sign) if sign else None, False
        return self._dead or Alive()

    def account(self) -> None:
        """Its end is in the report."""
        self.accounted = True

    def answers(self) -> bool:
        """Whether it gives the list of its models within 10 s."""
        return self._endpoint.page("/v1/models") is not None

    def _died(self, what: str) -> Dead:
        cause = Cause(
            kind="engine_dead",
            summary=what,
            owner="whoever keeps the attached server: its own log says why it ended",
            remedy="attach to one process, and let it live until the run has ended",
        )
        ended = f"the attached server ended, and was perhaps started again: {what}"
        return Dead(ended, cause, time.monotonic(), self._log)

    def _change(self) -> str | None:
        """What shows that another process answers than before; None where nothing does."""
        now, before = self._read(), self._last
        self._last = replace(
            now,
            started=before.started if now.started is None else now.started,
            version=now.version or before.version,
            counters={**before.counters, **now.counters},
        )
        return _difference(before, now, self._created_stands)

    def _silence(self) -> str | None:
        deadline = time.monotonic() + _GONE_AFTER_S
        with self._endpoint.http(timeout_s=10.0) as http:
            while True:
                try:
                    answer = http.get("/v1/models")
                except httpx.TimeoutException:
                    return None  # slow, perhaps for others' sake; a hang is for a test to find
                except httpx.TransportError as error:
                    why = f"it answers no more ({type(error).__name__}: {error})"
                else:
                    if not self._named or self._own(json_in(answer)) is not None:
                        return None
                    why = f"its model is named no more (/v1/models: HTTP {answer.status_code})"
                if time.monotonic() >= deadline:
                    return why
                time.sleep(0.5)

    def _own(self, models: dict[str, Any]) -> dict[str, Any] | None:
        """What a server's list of models says of its own; None where it does not name it."""
        entries = [entry for entry in models.get("data") or () if isinstance(entry, dict)]
        return next((e for e in entries if e.get("id") == self._endpoint.served_name), None)

    def _read(self) -> _Sign:
        text = self._endpoint.page("/metrics") or ""
        with self._endpoint.http(timeout_s=10.0) as http:
            version = json_of(http, "/version").get("version")
            created = (self._own(json_of(http, "/v1/models")) or {}).get("created")
        return _Sign(
            metrics.total(text, "process_start_time_seconds"),
            None if version is None else str(version),
            created if isinstance(created, int) else None,
            metrics.counters(text),
        )


def _difference(before: _Sign, now: _Sign, created_stands: bool) -> str | None:
    if before.started is not None and now.started is not None:
        if abs(now.started - before.started) > CLOCK_SLACK_S:
            return (
                f"its process began at {_moment(now.started)}, the one before at "
                f"{_moment(before.started)}"
            )
    elif created_stands and now.created is not None and now.created != before.created:
        return f"its model was created at {now.created}, before at {before.created}"
    if None not in (before.version, now.version) and before.version != now.version:
        return f"its version is {now.version}, before {before.version}"
    for name, count in before.counters.items():
        if (current := now.counters.get(name)) is not None and current < count:
            return f"its counter {name} fell from {count:g} to {current:g}"
    return None


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
