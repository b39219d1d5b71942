"""Item 7: the engine ends between two tests, although nobody stopped it."""

import time

from meta_tests.fakes.scripted_sessions import (
    attached_engine,
    run_of_pytest,
    script,
    scripted,
    tell,
)
from meta_tests.faults.false_greens import Case, Kit, Outcome
from meta_tests.two_steps import in_two_steps
from sm121.session.given_attached import GivenServer
from sm121.session.session import Session


@in_two_steps
def ends(session: Session, do: str, *then: str) -> None:
    """End a server in the given way, and then request servers of the given configurations."""
    tell(session, f"do={do}")
    for configuration in then:
        session.run.server(configuration)


def is_restarted_by_us(session: Session) -> None:
    session.run.server()
    session.run.servers.stop()
    session.run.server("bfloat16")
    session.run.server()


def lives(session: Session) -> None:
    session.run.server()
    time.sleep(0.3)
    session.run.server()


@in_two_steps
def dies_behind_a_proxy(kit: Kit, *, dies: bool) -> Outcome:
    def doing(session: Session) -> None:
        session.run.server()
        session.run.servers.look()
        if dies:
            process.kill()
            process.wait()

    url_file = kit.tmp_path / f"url-{dies}"
    with attached_engine(kit.tmp_path / f"proxied-{dies}.log") as (behind, process):
        url_file.write_text(behind)
        log = kit.tmp_path / f"proxy-{dies}.log"
        with attached_engine(log, "--forward", str(url_file)) as (url, _):
            return script(kit, f"proxied-{dies}-report", doing, attached=GivenServer(url))


CASES = [
    Case(
        item="7 A crash between tests",
        name="SIGSEGV after a test of the smoke level; a later test gets a fresh server",
        fault=run_of_pytest("do=signal&number=11"),
        clean=run_of_pytest(""),
        expected="the server ended with status -11",
    ),
    Case(
        item="7 A crash between tests",
        name="SIGSEGV after the last look of a script",
        fault=scripted(ends("signal&number=11")),
        clean=scripted(lives),
        expected="got in the run: the server ended with status -11",
    ),
    Case(
        item="7 A crash between tests",
        name="it ends by itself with status 0",
        fault=scripted(ends("exit&status=0", "float32")),
        clean=scripted(is_restarted_by_us),
        expected="the server ended with status 0",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="dead when another configuration is asked for",
        fault=scripted(ends("signal&number=9", "bfloat16")),
        clean=scripted(is_restarted_by_us),
        expected="the server ended with status -9",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="its engine core is dead, its API process lives",
        fault=scripted(ends("core&number=9", "float32")),
        clean=scripted(lives),
        expected="the server answers /health with 503",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="its engine core crashes, and it starts another by itself",
        fault=scripted(ends("core&number=9", "float32"), "--heals"),
        clean=scripted(lives, "--heals"),
        expected="ended by SIGKILL",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="it crashes while it is stopped",
        fault=scripted(lives, "--crashes-at-the-end"),
        clean=scripted(lives),
        expected="it died of SIGSEGV",
    ),
    Case(
        item="7 A crash between tests",
        name="an attached server dies, and the proxy before it answers 502",
        fault=dies_behind_a_proxy(dies=True),
        clean=dies_behind_a_proxy(dies=False),
        expected="it no longer lists its model (/v1/models: HTTP 502)",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="its engine core ends by signal 1, and it starts another by itself",
        fault=scripted(ends("core&number=1", "float32"), "--heals"),
        clean=scripted(lives, "--heals"),
        expected="of the engine ended with status -1",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="its engine core ends by signal 10, and it starts another by itself",
        fault=scripted(ends("core&number=10", "float32"), "--heals"),
        clean=scripted(lives, "--heals"),
        expected="of the engine ended with status -10",
        slow=True,
    ),
    Case(
        item="7 A crash between tests",
        name="its engine core ends by signal 15, and it starts another by itself",
        fault=scripted(ends("core&number=15", "float32"), "--heals"),
        clean=scripted(lives, "--heals"),
        expected="of the engine ended with status -15",
        slow=True,
    ),
]
