"""Preflight: every check finds the fault that it exists for, and is silent without it."""

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_rows import from_data, table

from sm121.compilation.jit import FlashInferModules, bounding_variables
from sm121.core import profile
from sm121.core.engine_settings import Needs
from sm121.engines import preflight
from sm121.engines.preflight import Preflight, PreflightFinding, load_preflight

GOOD_ARGUMENTS = ["--model", "m", "--attention-backend", "TRITON_ATTN", "--moe-backend", "marlin"]
GOOD_ENVIRONMENT = {"VLLM_KV_CACHE_LAYOUT": "HND", "VLLM_LOGGING_LEVEL": "DEBUG"}
MXFP8 = ["--quantization-config", '{"moe":{"activation":"mxfp8"}}']


def found(
    arguments=GOOD_ARGUMENTS, environment=GOOD_ENVIRONMENT, *, flashinfer=None, beside=(), **options
):
    fields = {"arch": "sm121", "needs": Needs(), "directory": Path(), **options}
    if flashinfer is not None:
        fields["modules"] = FlashInferModules(flashinfer, fields["directory"], beside=dict(beside))
    start = Preflight(fields.pop("arch"), arguments, environment, **fields)
    return start.findings()


def found_of(row: dict[str, Any], **options: Any) -> list[PreflightFinding]:
    return found(**{"arguments": [], "environment": {}, **options, **row})


def checks(findings: list[PreflightFinding]) -> set[str]:
    return {finding.check for finding in findings}


_DATA = tomllib.loads((Path(__file__).parent / "data" / "preflight.toml").read_text("utf-8"))
HIT, NEAR_MISS = _DATA["hit"], _DATA["near_miss"]


def test_every_rule_has_a_case():
    assert {rule.id for rule in load_preflight().rule} == set(HIT)


@pytest.mark.parametrize("rule", sorted(HIT))
def test_rule_hits(rule):
    findings = found_of(HIT[rule], flashinfer="0.6.15.post1")
    finding = next(item for item in findings if item.check == rule)
    assert finding.remedy
    if rule != "attention_by_network":  # which speaks of what is not there
        assert "seen: " in finding.message


@pytest.mark.parametrize("rule", sorted(NEAR_MISS))
def test_rule_does_not_hit_what_is_right(rule):
    assert rule not in checks(found_of(NEAR_MISS[rule]))


#: christopherowen/spark-vllm-mxfp4-docker and eugr/spark-vllm-docker, as far as rules speak of it.
RECIPE = table(__name__, "RECIPE")


@pytest.mark.parametrize("backend", ["CUTLAS", "Cutlass", "gemv", "CUTLASS_MXFP8", "auto"])
def test_a_backend_that_the_build_lacks_is_named_before_a_start(backend):
    """One that is left to the build is no mistake."""
    for start in ((["--mxfp4-backend", backend], {}), ([], {"VLLM_MXFP4_BACKEND": backend})):
        findings = found(*start, version="0.14.0+mxfp4")
        wrong = [each for each in findings if each.severity == "error"]
        assert len(wrong) == (backend != "auto"), wrong
        for each in wrong:
            assert backend in each.message
            assert "CUTLASS, MARLIN or TRITON" in (each.remedy or "")


@from_data
def test_what_is_told_of_a_start(start, options, tells, tells_not, exactly):
    """Rules of a build, a release and an architecture stay there. `start`: its arguments and its
    environment, else good ones."""
    names = checks(found(*start or (), **options or {}))
    assert names >= {*(tells or ())} and not names & {*(tells_not or ())}
    assert exactly is None or names == {*exactly}


def test_errors_come_first():
    findings = found(["--moe-backend", "flashinfer_trtllm", "--load-format", "fastsafetensors"], {})
    ranks = [["error", "warning", "note"].index(finding.severity) for finding in findings]
    assert ranks == sorted(ranks) and ranks[0] == 0


def test_memory():
    assert found(needs=Needs(memory_gib=0.001)) == []
    (finding,) = found(needs=Needs(memory_gib=1e6))
    assert (finding.check, finding.severity) == ("memory", "error")
    assert "1000000.0 GiB" in finding.message


@from_data
def test_memory_of_another_node(available_gib, expected):
    other = {"available_bytes": int(available_gib * 2**30)}
    facts = {"node 0 (spark1)": {**other, "available_bytes": 0}, "node 1 (spark2)": other}
    findings = [*preflight.of_nodes(Needs(memory_gib=9), facts)]
    assert len(findings) == len(expected), findings
    for each, start in zip(findings, expected, strict=True):
        assert f"{each.severity}: {each.message}".startswith(start)


def test_disk(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    assert found(needs=Needs(disk_gib=0.001), directory=folder) == []
    (finding,) = found(needs=Needs(disk_gib=1e9), directory=folder)
    assert (finding.check, finding.severity) == ("disk", "error")
    assert not folder.exists()


@from_data
def test_arch_lists(name, value, severity):
    findings = found(environment={name: value}, needs=Needs(arch_list=("12.1a", "12.1f")))
    assert [finding.severity for finding in findings] == [severity] * (severity is not None)
    for finding in findings:
        assert finding.check == "arch_list"
        assert repr(value) in finding.message and "12.1a" in finding.remedy
    assert found(environment={name: value}) == [], "nothing is asked"


def build(base: Path, arch: str, module: str, version: str = "0.7.2") -> None:
    folder = base / ".cache" / "flashinfer" / version / arch / "cached_ops" / module
    folder.mkdir(parents=True)
    if "attention_sink" in module:
        generated = folder.parents[1] / "generated" / module
        generated.mkdir(parents=True)
        (generated / "batch_prefill_config.inc").write_text("using DTypeKV = nv_bfloat16;\n")
    (folder / f"{module}.so").touch()


EXPERTS, SINK = "fused_moe_120", "batch_prefill_attention_sink_bf16_swa_True_fa2"
JIT = Needs(jit_modules=("experts", "attention_sink_window"), weights_gib=65)
CUTLASS = ["--moe-backend", "flashinfer_cutlass", *MXFP8, "--attention-backend=FLASHINFER"]
#: GiB that are available on a Spark: beside 65 + 4, four jobs of 9.3 GiB fit.
SPARK = 112


def tools(base: Path) -> Path:
    folder = base / "cuda" / "bin"
    if not folder.is_dir():
        folder.mkdir(parents=True)
        for name in ("nvcc", "ninja"):
            (folder / name).touch(0o755)
    return folder


def jit(
    base: Path, arguments: list[str] = CUTLASS, modules=None, cold_ready_within_s=None, **more: str
) -> dict[tuple[str, str], PreflightFinding]:
    environment = {"FLASHINFER_WORKSPACE_BASE": str(base), "PATH": str(tools(base)), **more}
    limits = {} if cold_ready_within_s is None else {"cold_ready_within_s": cold_ready_within_s}
    start = Preflight(
        "sm121", arguments, environment, needs=JIT, directory=base, modules=modules, **limits
    )
    rules = {rule.id for rule in load_preflight().rule}
    return {(f.check, f.severity): f for f in start.findings() if f.check not in rules}


def available(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    memory = SimpleNamespace(available=gib * 2**30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("os.cpu_count", lambda: 20)
    monkeypatch.setattr("sm121.engines.preflight._DEFAULT_NVCC", "/nowhere/nvcc")


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, SPARK)


@from_data
def test_what_a_cache_of_compiled_modules_and_the_jobs_come_to(
    tmp_path, monkeypatch, gib, built, without, arguments, variables, found, said, not_said
):
    """More jobs than fit are refused before anything starts; they are never changed. vLLM looks for
    a compiler, unless VLLM_HAS_FLASHINFER_CUBIN is set, and does without FlashInfer where that is
    its own choice. `without`: a file that is not there."""
    available(monkeypatch, gib or SPARK)
    for arch, module in built or ():
        build(tmp_path, arch, module)
    tools(tmp_path)
    if without:
        next(tmp_path.rglob(without)).unlink()
    variables = {k: v.replace("HERE", str(tmp_path)) for k, v in (variables or {}).items()}
    findings = jit(tmp_path, CUTLASS if arguments is None else [*arguments], **variables)
    assert sorted(" ".join(key) for key in findings) == [*found]
    text = "\n".join(f"{finding.message} {finding.remedy}" for finding in findings.values())
    assert all(part in text for part in said or ()), text
    assert not any(part in text for part in not_said or ()), text


@pytest.mark.usefixtures("spark")
def test_modules_of_another_version_or_architecture_are_cold(tmp_path):
    """A package that was compiled ahead is no help where its code does not run."""
    build(tmp_path, "121a", EXPERTS)
    build(tmp_path, "121a", SINK)
    cache, ahead = tmp_path / ".cache" / "flashinfer", tmp_path / "ahead"
    assert jit(tmp_path, modules=FlashInferModules("0.7.2", cache)) == {}
    finding = jit(tmp_path, modules=FlashInferModules("0.7.3", cache))["jit_cache", "note"]
    assert "cold" in finding.message and "0.7.3" in finding.message
    for module in (EXPERTS, SINK):
        (ahead / module).mkdir(parents=True)
        (ahead / module / f"{module}.so").write_bytes(b"no device code")
    modules = FlashInferModules("0.7.2", tmp_path / "none", (ahead,))
    assert ("jit_cache", "note") in jit(tmp_path, modules=modules)


@pytest.mark.parametrize(("gib", "refused"), [(80.0, True), (SPARK, False)])
def test_compilers_that_need_longer_than_a_cold_start_has(monkeypatch, tmp_path, gib, refused):
    """Beside the weights one job fits into 80 GiB: the start would be ended while it works."""
    available(monkeypatch, gib)
    findings = jit(tmp_path, cold_ready_within_s=2700)
    assert (("jit_time", "error") in findings) == refused
    if refused:
        finding = findings["jit_time", "error"]
        assert "a cold start may take 45" in finding.message
        assert "sm121 warm" in str(finding.remedy)


@pytest.mark.usefixtures("spark")
def test_compilers_where_flashinfer_finds_them(tmp_path):
    """CUDA_HOME comes first: see the rows above."""
    assert ("jit_tools", "error") not in jit(tmp_path)
    ninja = tmp_path / "ninja" / "bin"
    ninja.mkdir(parents=True)
    (ninja / "ninja").touch(0o755)
    elsewhere = {"PATH": str(ninja), "CUDA_HOME": str(tmp_path / "cuda")}
    assert ("jit_tools", "error") not in jit(tmp_path, **elsewhere)


@from_data
def test_how_many_compilers_a_start_may_run_at_the_same_time(
    monkeypatch, gib, needs, arguments, variables, bounds
):
    """By the memory beside the weights; the attention's compilers are small: one a core. Where
    nothing is compiled, nothing is set, and what the user gave stays."""
    available(monkeypatch, gib or SPARK)
    assert bounding_variables(needs or JIT, arguments or CUTLASS, variables or {}) == bounds


def test_a_start_gets_its_bounds():
    """The shipped profile leaves it to the suite."""
    gb10 = profile.load("sm121-gpt-oss-120b")
    arguments = [*gb10.engine.arguments, *gb10.configurations["cutlass"].arguments]
    added = bounding_variables(gb10.engine.needs, arguments, gb10.engine.environment)
    assert set(added) == {"MAX_JOBS", "FLASHINFER_NVCC_THREADS"}
