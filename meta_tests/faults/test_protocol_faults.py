"""All protocol faults are listed, and the table contains exactly these faults.

test_fault_catalogue.py runs a sample of them, and `make catalogues` runs all of them."""

import copy
import dataclasses
import json
import re

import httpx
import pytest

from meta_tests.fakes.fault_proxy import FAULTS, LIES, Fault, FaultProxy
from meta_tests.faults import lies
from meta_tests.faults.protocol_faults import Outcome, node_id, table
from meta_tests.folders import ROOT

DOCUMENT = ROOT / "docs" / "tables" / "protocol-faults.md"


@pytest.mark.parametrize("test", sorted({fault.caught_by for fault in FAULTS.values()}))
def test_every_fault_names_a_test_of_the_levels(test):
    assert node_id(test).startswith("tests/test_")


def test_each_fault_is_in_one_pair_drawn_by_the_seed():
    drawn = lies.pairs([*lies.PLANTED], 7)
    names = set()
    for pair in drawn:
        names.update(pair)
    assert names == set(lies.PLANTED)
    assert drawn == lies.pairs([*lies.PLANTED], 7) != lies.pairs([*lies.PLANTED], 8)


def test_a_name_that_is_no_test_is_refused():
    with pytest.raises(LookupError):
        node_id("test_of_nothing")


def test_the_table_has_every_fault_killed():
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \| (\S+) \|", DOCUMENT.read_text("utf-8"), re.M)
    assert {name: test for name, test, _ in rows} == {
        fault.name: fault.caught_by for fault in FAULTS.values()
    }, "docs/tables/protocol-faults.md is of other faults; docs/new-check.md has the command"
    assert {killed for _, _, killed in rows} == {"yes"} and len(rows) >= 35


def outcome(status: int, *tests: tuple[str, str, str]) -> Outcome:
    return Outcome("no [DONE]", status, tests, 1.0)


@pytest.mark.parametrize(
    "survived",
    [
        pytest.param(outcome(0, ["test_a", "PASS", ""]), id="outcome 0 test_a PASS"),
        pytest.param(
            outcome(5, ["test_a", "NOT_RUN", "no such capability"]),
            id="outcome 5 test_a NOT_RUN no such capability",
        ),
        pytest.param(outcome(4), id="outcome 4"),
        pytest.param(
            outcome(1, ["test_a", "FAIL", "KeyError: 'choices'"]),
            id="outcome 1 test_a FAIL KeyError: 'choices'",
        ),
    ],
)
def test_only_a_failure_with_its_requirement_detects_a_fault(survived):
    assert not survived.killed
    killed = outcome(1, ("test_a", "FAIL", "expected this, got that"))
    assert killed.killed
    text = table([killed, survived], outcome(0, ("test_a", "PASS", "")), 60.0)
    assert "1 of 2 faults were detected" in text and "**no**" in text


def test_a_failure_of_the_proxy_itself_is_no_kill():
    failed = ("test_a", "FAIL", "expected 200, got RemoteProtocolError")
    assert not dataclasses.replace(outcome(1, failed), proxy_error="TypeError: no function").killed


def test_a_proxy_whose_fault_raises_keeps_the_exception():
    def raises(request):
        raise TypeError("not callable")

    def post(url: str) -> None:
        httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, trust_env=False)

    broken = Fault("broken", "", request=raises)
    with FaultProxy.listening("http://127.0.0.1:1", broken) as proxy:
        with pytest.raises(httpx.RemoteProtocolError):
            post(proxy.base_url)
        assert proxy.errors == ["TypeError: not callable"]
        proxy.switch(broken)
        assert not proxy.errors


#: Bodies that the levels send, in the smallest form that has every part.
BODIES = {
    "completion": {"prompt": "a", "max_tokens": 2, "stream": True},
    "chat": {
        "messages": [
            {"role": "developer", "content": "b"},
            {"role": "user", "content": "  a "},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "reasoning": "c"},
            {"role": "tool", "content": "d"},
        ],
    },
    "response": {"input": [{"role": "user", "content": "a"}], "instructions": "b"},
}


@pytest.mark.parametrize("name", [*FAULTS, *LIES])
def test_each_fault_can_change_what_is_sent(name):
    fault = (FAULTS | LIES)[name]
    for body in BODIES.values():
        json.dumps(fault.request(copy.deepcopy(body)))


def test_texts_are_stripped_of_spaces():
    sent = FAULTS["texts are stripped"].request(copy.deepcopy(BODIES["chat"]))
    assert sent["messages"][1]["content"] == "a"


def test_a_fault_changes_nothing_else():
    answer = {"choices": [{"text": "x"}]}
    plain = Fault("none", "")
    for change in (plain.request, plain.completion, plain.chat, plain.response):
        assert change(answer) is answer
