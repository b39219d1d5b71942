"""Tests of a user's project on servers that fail. `test_downstream_llm_server.py` has the expected
outcomes. The engine is `meta_tests.fakes.llm_engine`."""

import httpx
import pytest

#: The address of `llm_server` in the last test that used this fixture.
_last: list[str] = []


def ask(server, prompt: str = "Hello") -> None:
    with server.http(timeout_s=1.0) as http:
        http.post("/v1/completions", json={"prompt": prompt}).raise_for_status()


@pytest.mark.timeout(2)
def test_slow_start_is_not_in_the_time_of_the_test(llm_server_factory):
    with llm_server_factory("slow", ["--fault", "slow"]) as server:
        ask(server)


def test_does_not_start(llm_server_factory):
    with llm_server_factory("no-memory", ["--fault", "exit-oom"]):
        pass


def test_hangs_at_its_start(llm_server_factory):
    with llm_server_factory("hanging", ["--fault", "never-ready"], ready_within_s=1.0):
        pass


@pytest.fixture(scope="module")
def mortal(llm_server_factory):
    with llm_server_factory("mortal", ["--fault", "obeys"], {"HF_TOKEN": "hf-T0psecret"}) as it:
        yield it


@pytest.fixture(scope="module")
def address(mortal):
    return mortal.url


def test_dies_in_the_test(mortal, address):
    assert mortal.url == address
    print(f"the key is {mortal.api_key}")
    ask(mortal, "die")


def test_after_a_death_a_new_one_is_there(mortal, address):
    assert mortal.url == address and httpx.get(f"{address}/health").status_code == 200


def test_dies_in_a_block_of_the_test(llm_server_factory):
    with llm_server_factory("mortal", ["--fault", "obeys"]) as server:
        ask(server, "die")


@pytest.mark.timeout(3)  # the request for a token takes longer than this
def test_hangs_in_the_test(llm_server_factory):
    with llm_server_factory("hanging", ["--fault", "obeys"]) as server:
        ask(server, "hang")


def test_fails_by_itself(mortal):
    assert mortal.model == "immortal"


@pytest.fixture
def killed_afterwards(mortal):
    yield
    with pytest.raises(httpx.HTTPError):
        ask(mortal, "die")


def test_passes_and_is_followed_by_a_death(mortal, killed_afterwards):
    pass


def test_died_before_the_test(mortal):
    pass


def test_after_a_death_between_tests(mortal):
    assert httpx.get(f"{mortal.url}/health").status_code == 200


def test_the_server_of_the_run(llm_server, llm_client):
    assert llm_client.models.list().data
    _last.append(llm_server.url)


def test_another_one_takes_its_place(llm_server_factory):
    with llm_server_factory("another") as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{_last[-1]}/health")


def test_both_at_once(llm_server, llm_server_factory):
    with llm_server_factory("another") as server:
        for each in (server, llm_server):
            assert httpx.get(f"{each.url}/health").status_code == 200
