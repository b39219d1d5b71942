"""Smoke: the server starts as configured, with the expected software, and answers.

If a test of this level fails, no other level runs.
"""

from __future__ import annotations

import dataclasses

import pytest

from sm121.core import interpreter
from sm121.core.unmet import require
from sm121.core.verdict import Inconclusive, NotRun
from sm121.evidence.kernel_path import mistaken_environment

pytestmark = [pytest.mark.smoke, pytest.mark.applies_to("cpu", "gpu")]


def test_machine_is_fit_for_a_start(configurations):
    """Memory, disk, architecture list, JIT cache and MAX_JOBS allow a start, and no setting is
    known to fail."""
    unfit = [
        f"{finding.message} Remedy: {finding.remedy}"
        for finding in configurations.findings
        if finding.severity == "error"
    ]
    assert not unfit, "; ".join(unfit)


def test_imports_come_from_where_they_should(conformance, configurations, profile):
    """The engine's interpreter imports its own packages, or the checkouts that the profile
    names."""
    engine = conformance.settings.engine.name
    configuration = configurations.managed(profile.under_test)
    imported = interpreter.imports(
        conformance.engine_interpreter,
        (engine, "flashinfer"),
        configurations.environment(configuration),
    )
    require(
        imported.origins[engine], f"{configuration.python} to import {engine}", "no such module"
    )
    wrong = interpreter.misplaced(imported, profile.engine.checkouts)
    assert not wrong, "; ".join(wrong)


def test_baseline_starts_and_answers(servers, profile):
    """The baseline configuration starts and answers."""
    baseline = servers(profile.baseline)
    with baseline.endpoint.openai() as client:
        answer = client.completions.create(
            model=baseline.endpoint.served_name, prompt="Hello", max_tokens=1
        )
    one = answer.usage is not None and answer.usage.completion_tokens == 1
    require(one, "one token", f"usage {answer.usage}")


def test_stop_leaves_nothing_behind(servers, profile):
    """After a stop, no process of the run remains, the port is free, and the memory is released."""
    servers(profile.baseline)
    report = servers.stop()
    survivors = [str(survivor) for survivor in report.survivors]
    require(not survivors, "no process", survivors)
    require(report.port_free, "a free port", "a process that listens on it")
    require(
        report.memory.missing_bytes == 0,
        "all memory that no living process holds to be free again",
        "missing",
        value=report.memory.missing_bytes / 2**30,
        unit="GiB",
        evidence=report.log,
    )


def test_server_is_ready_in_time(server, profile):
    """Within its time limit, the server answers /health and generates a token."""
    if not server.managed:
        raise NotRun("the suite did not start the attached server")
    limit = profile.engine.ready_within_s.value
    if server.startup_s > limit and server.why_cold:
        raise Inconclusive(server.why_cold)
    startup_s = server.startup_s
    require(startup_s <= limit, "ready within", value=startup_s, limit=limit, unit="s")


def test_version_is_known(conformance, server):
    """The engine reports its version. Without it, a result cannot be compared with any other."""
    version = conformance.run.record.file.engine.version
    if not server.managed and not version:
        raise NotRun("the attached server has no /version; give its log: --server-log PATH")
    require(version, "a version at /version")


def test_start_up_log_shows_no_failure(kernel_path, server):
    """The start-up log shows no CUDA initialisation error, no failed JIT compilation and no dead
    engine."""
    if server.log is None:
        raise NotRun(server.why_no_log)
    where = f"{kernel_path.evidence.get('failure')} in {server.log}"
    require(kernel_path.failure is None, "no failure", kernel_path.failure, evidence=where)


def test_every_variable_is_known_to_the_engine(kernel_path, server):
    """The engine knows each VLLM_* variable that is set. An unknown variable has no effect."""
    if server.log is None:
        raise NotRun(server.why_no_log)
    unknown = mistaken_environment(kernel_path)
    require(not unknown, "no unknown VLLM_* variable", ", ".join(unknown))


def test_health(http, server):
    """GET /health returns status 200."""
    status = http.get("/health").status_code
    if not server.managed and status == 404:
        raise NotRun("the attached server has no /health; other engines may not need one")
    require(status == 200, 200, status)


def test_requests_without_the_key_are_refused(server):
    """A server that the suite started refuses requests without its API key."""
    if not server.managed:
        raise NotRun("whether the attached server has a key is its owner's choice")
    stranger = dataclasses.replace(server.endpoint, api_key="none")
    with stranger.http() as http:
        status = http.get("/v1/models").status_code
    require(status in (401, 403), "401 or 403", status)


def test_models_lists_the_model(client, model):
    """GET /v1/models lists the served model."""
    names = [entry.id for entry in client.models.list()]
    require(model in names, model, names)


def test_one_completion(client, model):
    """A completion has text, and its usage is exact."""
    answer = client.completions.create(model=model, prompt="The capital of France is", max_tokens=4)
    choice = answer.choices[0]
    require(choice.text, "some text")
    exact = answer.usage is not None and 1 <= answer.usage.completion_tokens <= 4
    require(exact, "1 to 4 tokens", f"usage {answer.usage}")


@pytest.mark.ability("chats")
def test_one_chat(client, model, profile):
    """A chat ends by itself, with a final message."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": profile.correctness.chats[0].question}],
        max_tokens=profile.correctness.max_answer_tokens,
        temperature=0.0,
    )
    choice = answer.choices[0]
    require(choice.finish_reason == "stop", "stop", choice.finish_reason)
    require(choice.message.content, "content", choice.message)
