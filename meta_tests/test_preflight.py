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
ARCH_LIST = ("12.1a", "12.1f")


def found(
    arguments: list[str] | None = None,
    environment: dict[str, str] | None = None,
    *,
    arch: str = "sm121",
    needs: Needs | None = None,
    directory: Path = Path(),
    flashinfer: str | None = None,
    version: str | None = None,
) -> list[PreflightFinding]:
    return Preflight(
        arch,
        GOOD_ARGUMENTS if arguments is None else arguments,
        GOOD_ENVIRONMENT if environment is None else environment,
        needs=needs or Needs(),
        directory=directory,
        modules=None if flashinfer is None else FlashInferModules(flashinfer, directory),
        version=version,
    ).findings()


def found_of(row: dict[str, Any], **options: Any) -> list[PreflightFinding]:
    return found(**{"arguments": [], "environment": {}, **row}, **options)


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


@pytest.mark.parametrize("backend", ["CUTLAS", "Cutlass", "gemv", "CUTLASS_MXFP8"])
def test_a_backend_that_the_build_lacks_is_named_before_a_start(backend):
    for given in ((["--mxfp4-backend", backend], {}), ([], {"VLLM_MXFP4_BACKEND": backend})):
        (finding,) = [
            each for each in found(*given, version="0.14.0+mxfp4") if each.severity == "error"
        ]
        assert backend in finding.message and "CUTLASS, MARLIN or TRITON" in (finding.remedy or "")


def test_a_backend_that_is_left_to_the_build_is_no_mistake():
    for given in ((["--mxfp4-backend", "auto"], {}), ([], {"VLLM_MXFP4_BACKEND": "auto"})):
        assert not [f for f in found(*given, version="0.14.0+mxfp4") if f.severity == "error"]


@from_data
def test_what_is_told_of_a_start(start, options, tells, tells_not, exactly):
    """Rules of a build, a release and an architecture stay there. `start`: its arguments and its
    environment, else good ones."""
    names = checks(found(*start or (), **options or {}))
    assert names >= {*(tells or ())} and not names & {*(tells_not or ())}
    assert exactly is None or names == {*exactly}


def test_errors_come_first():
    findings = found(["--moe-backend", "flashinfer_trtllm", "--load-format", "fastsafetensors"], {})
    ranks = [{"error": 0, "warning": 1, "note": 2}[finding.severity] for finding in findings]
    assert ranks == sorted(ranks)
    assert ranks[0] == 0


def test_memory():
    assert found(needs=Needs(memory_gib=0.001)) == []
    (finding,) = found(needs=Needs(memory_gib=1e6))
    assert (finding.check, finding.severity) == ("memory", "error")
    assert "1000000.0 GiB" in finding.message


@from_data
def test_memory_of_another_node(available_gib, others, expected):
    there = {"available_bytes": int(available_gib * 2**30), "gpu_neighbours": others}
    facts = {"node 0 (spark1)": {**there, "available_bytes": 0}, "node 1 (spark2)": there}
    findings = [*preflight.of_nodes(Needs(memory_gib=9), facts)]
    assert len(findings) == len(expected), findings
    for each, start in zip(findings, expected, strict=True):
        assert f"{each.severity}: {each.message}".startswith(start)


def test_disk(tmp_path):
    place = tmp_path / "not" / "there" / "yet"
    assert found(needs=Needs(disk_gib=0.001), directory=place) == []
    (finding,) = found(needs=Needs(disk_gib=1e9), directory=place)
    assert (finding.check, finding.severity) == ("disk", "error")
    assert not place.exists()


@from_data
def test_arch_lists(name, value, severity):
    findings = found(environment={name: value}, needs=Needs(arch_list=ARCH_LIST))
    assert [finding.severity for finding in findings] == ([] if severity is None else [severity])
    for finding in findings:
        assert finding.check == "arch_list"
        assert repr(value) in finding.message
        assert "12.1a" in finding.remedy


def test_arch_list_is_not_checked_when_nothing_is_asked():
    assert found(environment={"FLASHINFER_CUDA_ARCH_LIST": "12.1"}) == []


def build(base: Path, arch: str, module: str, version: str = "0.7.2") -> None:
    folder = base / ".cache" / "flashinfer" / version / arch / "cached_ops" / module
    folder.mkdir(parents=True)
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
    base: Path,
    arguments: list[str] = CUTLASS,
    modules: FlashInferModules | None = None,
    **more: str,
) -> dict[tuple[str, str], PreflightFinding]:
    environment = {"FLASHINFER_WORKSPACE_BASE": str(base), "PATH": str(tools(base)), **more}
    start = Preflight("sm121", arguments, environment, needs=JIT, directory=base, modules=modules)
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


@pytest.mark.usefixtures("spark")
@from_data
def test_what_a_cache_of_compiled_modules_and_the_jobs_come_to(
    tmp_path, built, arguments, variables, found, said, not_said
):
    """More jobs than fit are refused before anything starts; they are never changed."""
    for arch, module in built or ():
        build(tmp_path, arch, module)
    given = {k: v.replace("HERE", str(tmp_path)) for k, v in (variables or {}).items()}
    seen = jit(tmp_path, CUTLASS if arguments is None else [*arguments], **given)
    assert sorted(" ".join(key) for key in seen) == [*found]
    text = "\n".join(f"{finding.message} {finding.remedy}" for finding in seen.values())
    assert all(part in text for part in said or ()), text
    assert not any(part in text for part in not_said or ()), text


@pytest.mark.usefixtures("spark")
class TestJitCache:
    def test_another_version_is_cold(self, tmp_path):
        build(tmp_path, "121a", EXPERTS)
        build(tmp_path, "121a", SINK)
        cache = tmp_path / ".cache" / "flashinfer"
        assert jit(tmp_path, modules=FlashInferModules("0.7.2", cache)) == {}
        finding = jit(tmp_path, modules=FlashInferModules("0.7.3", cache))["jit_cache", "note"]
        assert "cold" in finding.message and "0.7.3" in finding.message

    def test_what_was_compiled_ahead_counts_for_its_architecture(self, tmp_path):
        """A package of compiled modules is no help where its code does not run."""
        found = FlashInferModules("0.7.2", tmp_path / "none", (tmp_path / "ahead",))
        for module in (EXPERTS, SINK):
            (tmp_path / "ahead" / module).mkdir(parents=True)
            (tmp_path / "ahead" / module / f"{module}.so").write_bytes(b"no device code")
        assert ("jit_cache", "note") in jit(tmp_path, modules=found)

    def test_directory_without_library_is_not_built(self, tmp_path):
        build(tmp_path, "121a", EXPERTS)
        next(tmp_path.rglob("*.so")).unlink()
        assert "cold" in jit(tmp_path)["jit_cache", "note"].message

    @pytest.mark.parametrize(("gib", "refused"), [(80.0, True), (SPARK, False)])
    def test_compilers_that_need_longer_than_a_cold_start_has(
        self, monkeypatch, tmp_path, gib, refused
    ):
        """Beside the weights one job fits into 80 GiB: the start would be ended while it works."""
        available(monkeypatch, gib)
        environment = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "PATH": str(tools(tmp_path))}
        start = Preflight(
            "sm121", CUTLASS, environment, needs=JIT, directory=tmp_path, cold_ready_within_s=2700
        )
        time = [item for item in start.findings() if item.check == "jit_time"]
        assert bool(time) == refused
        if refused:
            assert time[0].severity == "error" and "a cold start may take 45" in time[0].message
            assert "sm121 warm" in str(time[0].remedy)

    @pytest.mark.parametrize("lacking", ["nvcc", "ninja"])
    def test_a_compiler_that_is_missing(self, tmp_path, lacking):
        """vLLM looks for it, unless VLLM_HAS_FLASHINFER_CUBIN is set, and does without FlashInfer
        where that is its own choice."""
        (tools(tmp_path) / lacking).unlink()
        for given, own in (
            ({"VLLM_HAS_FLASHINFER_CUBIN": "1"}, "switches off vLLM's own look"),
            ({"VLLM_HAS_FLASHINFER_CUBIN": "0"}, "must be compiled"),
        ):
            finding = jit(tmp_path, **given)["jit_tools", "error"]
            assert f"there is no {lacking} " in finding.message and own in finding.message
            assert "CUDA_HOME" in str(finding.remedy)
        stock = jit(tmp_path, ["--moe-backend", "marlin"])
        assert ("jit_tools", "note") in stock and ("jit_tools", "error") not in stock
        cubin = jit(tmp_path, ["--moe-backend", "marlin"], VLLM_HAS_FLASHINFER_CUBIN="1")
        assert ("jit_tools", "error") in cubin

    def test_compilers_where_flashinfer_finds_them(self, tmp_path):
        """CUDA_HOME comes first, also where it leads nowhere."""
        assert ("jit_tools", "error") not in jit(tmp_path)
        ninja = tmp_path / "ninja" / "bin"
        ninja.mkdir(parents=True)
        (ninja / "ninja").touch(0o755)
        there = {"PATH": str(ninja), "CUDA_HOME": str(tmp_path / "cuda")}
        assert ("jit_tools", "error") not in jit(tmp_path, **there)
        assert ("jit_tools", "error") in jit(tmp_path, CUDA_HOME=str(tmp_path / "elsewhere"))

    def test_a_warm_cache_needs_no_compiler(self, tmp_path):
        build(tmp_path, "121a", EXPERTS)
        build(tmp_path, "121a", SINK)
        (tools(tmp_path) / "nvcc").unlink()
        assert jit(tmp_path, VLLM_HAS_FLASHINFER_CUBIN="1") == {}

    def test_what_cannot_fit_beside_the_weights_is_refused(self, tmp_path, monkeypatch):
        available(monkeypatch, 75)
        finding = jit(tmp_path)["jit_memory", "error"]
        assert "9.3 GiB" in finding.message and "65 GiB" in finding.message
        assert "75.0 GiB are available" in finding.message
        assert "sm121 warm" in str(finding.remedy)
        build(tmp_path, "121a", EXPERTS)  # the attention's compilers need half a GiB
        assert ("jit_memory", "error") not in jit(tmp_path)


class TestBound:
    """How many compilers a start may run at the same time."""

    @pytest.mark.parametrize(
        ("gib", "jobs"), [(112, "4"), (100, "3"), (88, "2"), (79, "1"), (60, "1"), (1000, "20")]
    )
    def test_by_the_memory_beside_the_weights(self, monkeypatch, gib, jobs):
        available(monkeypatch, gib)
        assert bounding_variables(JIT, CUTLASS, {}) == {
            "MAX_JOBS": jobs,
            "FLASHINFER_NVCC_THREADS": "1",
        }

    @pytest.mark.usefixtures("spark")
    def test_by_what_may_be_compiled(self):
        """The attention's compilers are small: one a core. Where nothing is compiled, nothing is
        set."""
        marlin = ["--moe-backend", "marlin", "--attention-backend"]
        assert bounding_variables(JIT, [*marlin, "FLASHINFER"], {})["MAX_JOBS"] == "20"
        assert bounding_variables(JIT, [*marlin, "TRITON_ATTN"], {}) == {}
        assert bounding_variables(Needs(), CUTLASS, {}) == {}

    @pytest.mark.usefixtures("spark")
    def test_what_the_user_gave_stays(self):
        assert bounding_variables(JIT, CUTLASS, {"MAX_JOBS": "16"}) == {
            "FLASHINFER_NVCC_THREADS": "1"
        }
        two = {"FLASHINFER_NVCC_THREADS": "4", "FLASHINFER_CUDA_ARCH_LIST": "12.0f 12.1a"}
        assert bounding_variables(JIT, CUTLASS, two) == {"MAX_JOBS": "2"}, "two at once in a job"

    def test_a_start_gets_it(self):
        """The shipped profile leaves it to the suite."""
        chosen = profile.load("sm121-gpt-oss-120b")
        arguments = [*chosen.engine.arguments, *chosen.configurations["cutlass"].arguments]
        added = bounding_variables(chosen.engine.needs, arguments, chosen.engine.environment)
        assert set(added) == {"MAX_JOBS", "FLASHINFER_NVCC_THREADS"}
