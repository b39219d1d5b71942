"""Item 17: an attached server is replaced by another one behind its URL."""

import contextlib
import dataclasses
import time
import tomllib
from collections.abc import Iterator, Sequence

from meta_tests.fakes.scripted_sessions import attached_engine, rate, script, tell
from meta_tests.faults.false_greens import Case, Kit, Outcome
from meta_tests.folders import DATA
from sm121.core.verdict import Invalid
from sm121.run.verdict_file import VerdictFile
from sm121.session.given_attached import GivenServer
from sm121.session.session import Session


@dataclasses.dataclass(frozen=True)
class Replaced:
    """Another process replaces an attached server after a rate was recorded.

    Attributes:
        start: Arguments of the server.
        then: Arguments of its replacement. If None, the server is not replaced.
        proxy: Arguments of a proxy in front of both servers. If None, both listen at the URL.
        measuring: Whether the replacement happens between two rounds of a second rate, and not
            between two tests.
        with_log: Whether the user names the log of the first server.
        core: Only its engine core ends, and the server starts another.
    """

    start: Sequence[str] = ()
    then: Sequence[str] | None = ()
    proxy: Sequence[str] | None = None
    measuring: bool = False
    with_log: bool = False
    core: bool = False

    @property
    def stays(self) -> "Replaced":
        """Return the clean twin, in which the server is not replaced."""
        return dataclasses.replace(self, then=None)

    def __call__(self, kit: Kit) -> Outcome:
        folder = kit.tmp_path / f"attached-{time.monotonic_ns()}"
        folder.mkdir()
        log = folder / "server.log"
        url_file = folder / "url"
        files: list[VerdictFile] = []
        with contextlib.ExitStack() as servers:
            url, process = servers.enter_context(attached_engine(log, *self.start))
            address = url
            if self.proxy is not None:
                url_file.write_text(url)
                forward = ("--forward", str(url_file), *self.proxy)
                address, _ = servers.enter_context(attached_engine(folder / "proxy.log", *forward))

            def doing(session: Session) -> None:
                files.append(session.run.record.file)
                with session.run.server().endpoint.http() as http:
                    for _ in range(3):
                        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9})
                session.recorder.record(rate("tg32@d0"))
                session.run.servers.look()  # the suite calls this between two tests
                if self.core and self.then is not None:
                    tell(session, "do=core&number=9")
                elif self.then is not None:
                    process.terminate()
                    process.wait(10)
                    time.sleep(2.1)  # a start within the same second cannot be distinguished
                    port = ("--port", url.rpartition(":")[2]) if self.proxy is None else ()
                    other = attached_engine(folder / "other.log", *port, *self.start, *self.then)
                    url_file.write_text(servers.enter_context(other)[0])
                if self.measuring:
                    with contextlib.suppress(Invalid):
                        session.recorder.record(rate("tg128@d0"))

            attached = GivenServer(address, log=log if self.with_log else None)
            outcome = script(kit, f"{folder.name}-report", doing, attached=attached)
        numbers = {metric.verdict.value for metric in files[0].metrics.values()}
        assert numbers == {"PASS" if self.then is None else "INVALID"}, outcome
        is_hidden = "/metrics" in (self.proxy or ())
        doubt = "not proven that the server was never restarted"
        summary = (kit.tmp_path / f"{folder.name}-report" / "summary.md").read_text()
        if self.then is None:  # the remarks that a PASS must not contain
            assert (doubt in summary) == is_hidden, summary
        assert (files[0].engine.unwatched in files[0].unproven) == is_hidden, files[0].unproven
        return outcome


def replacements() -> Iterator[Case]:
    """Return the rows of ``meta_tests/data/replaced-servers.toml``."""
    rows = tomllib.loads((DATA / "replaced-servers.toml").read_text("utf-8"))
    for name, row in rows.items():
        expected = row.pop("expected")
        slow = row.pop("slow", True)
        fault = Replaced(**row)
        item = "17 An attached server is replaced behind its URL"
        yield Case(item, name, fault, fault.stays, expected, slow)


CASES = [
    *replacements(),
]
