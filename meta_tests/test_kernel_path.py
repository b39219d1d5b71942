"""The reader of kernel paths: every signature reads its line, no trap is taken for evidence."""

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
from data_rows import from_data, table
from logs import lines_of, proofs, read_lines, stated

from sm121.core import profile
from sm121.core.data_file import DataFileError
from sm121.evidence.kernel_path import mistaken_environment, read_log
from sm121.evidence.log_lines import LINE_LIMIT, clean, read_raw_lines
from sm121.evidence.signatures import load_signatures, startup_progress
from sm121.run.harness import Harness

DATA = Path(__file__).parent / "data"
CORE = "(EngineCore pid=7) INFO 10-05 02:13:33 "
LINES = lines_of("vllm-lines.toml")
PROVES = proofs(LINES["proves"])


@pytest.mark.parametrize(("line", "field", "value"), PROVES)
def test_line_proves_value(line, field, value):
    path = read_lines([line])
    assert getattr(path, field) == value
    assert path.evidence[field] in clean(line).text
    assert len(path.evidence[field]) <= 400


@pytest.mark.parametrize("line", LINES["silent"] + LINES["benign"])
def test_line_proves_nothing(line):
    path = read_lines([line])
    # A refused backend is a failure, and proves no backend.
    assert stated(path).keys() <= {"failure"} and path.version is None
    assert path.failure is None or line not in LINES["benign"]


def unreached(engine: str, lines: Iterable[str]) -> list[str]:
    """Signatures of an engine's path that reach none of these lines."""
    cleaned = [clean(line) for line in lines]
    return [
        entry.id
        for entry in load_signatures(engine).signature
        if entry.field != "progress" and not any(entry.search(line) for line in cleaned)
    ]


def test_every_vllm_path_signature_is_exercised():
    """A signature that no line here reaches could be dead without anyone noticing."""
    lines = (*(line for line, _, _ in PROVES), *LINES["fallbacks"].values(), *LINES["others"])
    assert unreached("vllm", lines) == []
    fallbacks = {entry.id for entry in load_signatures("vllm").of("fallback")}
    assert fallbacks == set(LINES["fallbacks"]), "each has a line of its own"


@pytest.mark.parametrize("kind", sorted(LINES["fallbacks"]))
def test_fallback_is_told(kind):
    path = read_lines([LINES["fallbacks"][kind]])
    assert kind in path.fallbacks
    assert path.evidence[f"fallbacks.{kind}"]


@from_data
def test_a_fallback_is_told_in_other_words(line, fallbacks):
    assert read_lines([line]).fallbacks == [*fallbacks]


@from_data
def test_a_choice_of_one_is_told(line, fallbacks):
    path = read_lines([CORE + line])
    assert path.silent_fallbacks == [*fallbacks]
    assert path.fallbacks == []
    assert all(f"silent_fallbacks.{name}" in path.evidence for name in fallbacks)


@from_data
def test_lines_together_show_a_path(engine, lines, fields, unknown, evidence):
    """Fields with their values, fields without one, and a part of the evidence of some."""
    path = read_lines(lines, engine or "vllm")
    expected = (fields or {}) | dict.fromkeys(unknown or ())
    assert {field: getattr(path, field) for field in expected} == expected
    for field, part in (evidence or {}).items():
        assert part in path.evidence[field]
    also = {field for field in path.evidence if field.endswith("_also")}
    assert also <= (evidence or {}).keys()


WRAPPERS = table(__name__, "WRAPPERS")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_are_stripped(wrapper):
    path = read_lines([wrapper.format("[cuda.py:427] Using FLASH_ATTN backend.")])
    assert path.attention == "FLASH_ATTN"
    assert path.evidence["attention"] == "Using FLASH_ATTN backend."


def test_unknown_variables():
    line = "WARNING 07-02 21:58:11 [envs.py:2027] Unknown vLLM environment variable detected: "
    names = ["VLLM_ATTENTION_BACKEND", "VLLM_BUILD_URL", "VLLM_CPU_PORT_8000_TCP"]
    path = read_lines([line + name for name in (*names, names[0])])
    assert path.unknown_env == names
    assert mistaken_environment(path) == ["VLLM_ATTENTION_BACKEND"]


@from_data
def test_a_real_log_states_its_path(log, version, states):
    path = read_log(DATA / log)
    assert (stated(path), path.version) == (states, version)
    assert "version" not in path.model_dump()


def test_binary_and_endless_lines(tmp_path):
    log = tmp_path / "server.log"
    good = (CORE + "[cuda.py:427] Using FLASH_ATTN backend.").encode()
    binary, endless = b"\xff\xfe\x00\x80" * 50_000, b"x" * 3_000_000
    log.write_bytes(binary + b"\n" + endless + b"\r\n" + good + b"\r" + b"\x00" * 100)
    assert max(map(len, read_raw_lines(log))) <= LINE_LIMIT
    assert read_log(log).attention == "FLASH_ATTN"


def test_memory_does_not_grow_with_the_log():
    unknown = "WARNING [envs.py:1] Unknown vLLM environment variable detected: VLLM_"
    path = read_lines(f"{unknown}{n}" for n in range(2_000))
    assert 0 < len(path.unknown_env) < 1_000


@from_data
def test_other_engines(engine, line, field, value):
    assert getattr(read_lines([line], engine), field) == value


def test_every_signature_file_loads():
    folder = files("sm121.fixtures") / "signatures"
    names = {name for item in folder.iterdir() if (name := item.name).endswith(".toml")}
    names = {name.removesuffix(".toml") for name in names}
    assert {"vllm", "sglang", "llama-cpp", "failures"} <= names
    for name in names - {"failures"}:
        assert load_signatures(name).engine == name


def test_unknown_engine_is_refused():
    with pytest.raises(DataFileError, match=r"known engines: .*vllm"):
        read_lines([], "nobody")


@from_data
def test_startup_progress(line, phase):
    assert startup_progress(line) == phase


def test_startup_progress_of_a_real_start():
    lines = (DATA / "vllm-0.32-cpu-stopped.log").read_text("utf-8").splitlines()
    phases = [phase for phase in map(startup_progress, lines) if phase]
    assert (phases[0], phases[-1]) == ("starting the API server", "ready")
    assert len(set(phases)) >= 7


@from_data
def test_what_an_engine_does_not_log_is_not_held_to_it(tmp_path, name, change, managed, wrong):
    """vLLM on the CPU logs no attention. What it cannot show is not proven; the rest is judged."""
    log = tmp_path / "server.log"
    log.write_text((DATA / "vllm-0.32-cpu-stopped.log").read_text("utf-8").replace(*change))
    loaded, path = profile.load(name), read_log(log)
    under_test = loaded.configurations[loaded.under_test]
    server = SimpleNamespace(configuration=under_test if managed else None, log=log)
    harness = SimpleNamespace(profile=loaded, spanned=lambda _server: None)
    harness.kernel_path = lambda _server: path
    harness.unlogged = lambda server: Harness.unlogged(harness, server)
    if managed:
        assert harness.unlogged(server) is None
        return
    lines = [*map(str, Harness._contradictions(harness, server, loaded.under_test))]
    lines = [line for line in lines if "required" in line and "variables" not in line]
    assert len(lines) == len(wrong), lines
    assert all(line.startswith(text) for line, text in zip(lines, wrong, strict=True))
