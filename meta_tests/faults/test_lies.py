"""The proxy of `lies.py` repeats an answer only if no test requires a new one."""

import httpx
import pytest

from meta_tests.fakes.fault_proxy import FaultProxy
from meta_tests.faults.fault_exchanges import COMPLETIONS, Answer, Request
from meta_tests.faults.lies import Remembering
from meta_tests.faults.protocol_faults import NO_FAULT


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("test_correctness.py::test_repeated_equals_itself", 1),
        ("test_correctness.py::test_cold_equals_a_hit_of_the_prefix_cache", 2),
        ("test_correctness.py::test_a_hit_of_the_prefix_cache_saves_time", 2),
        ("test_stress.py::test_crowd", 1),
        ("test_stress.py::test_sequential_requests", 2),
    ],
)
def test_the_second_of_two_equal_requests(monkeypatch, test, expected):
    sent = []

    def forward(_proxy, request):
        sent.append(request)
        return Answer(200, "application/json", b'{"id": "cmpl-0123456789abcdef"}')

    monkeypatch.setattr(FaultProxy, "_ask", forward)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"tests/{test} (call)")
    with httpx.Client() as http:
        proxy = Remembering("http://127.0.0.1:9", NO_FAULT, "key", http)
        proxy.answers = {}
        for _ in range(2):
            request = Request("POST", COMPLETIONS, b'{"prompt": "One", "temperature": 0}', "key")
            assert proxy.answer(request).status == 200
    assert len(sent) == expected
