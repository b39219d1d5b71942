"""Each preflight check finds the fault for which it exists, and reports nothing without that
fault."""

import tomllib
from typing import Any

import pytest

from meta_tests.folders import DATA
from meta_tests.unit.engines.preflight_starts import checks, found
from sm121.core.engine_settings import Needs
from sm121.engines import preflight
from sm121.engines.preflight import PreflightFinding, load_preflight


def found_of(row: dict[str, Any], **options: Any) -> list[PreflightFinding]:
    return found(**{"arguments": [], "environment": {}, **options, **row})


_DATA = tomllib.loads((DATA / "preflight.toml").read_text("utf-8"))

HIT = _DATA["hit"]
NEAR_MISS = _DATA["near_miss"]


def test_every_rule_has_a_case():
    assert {rule.id for rule in load_preflight().rule} == set(HIT)


@pytest.mark.parametrize("rule", sorted(HIT))
def test_rule_hits(rule):
    findings = found_of(HIT[rule], flashinfer="0.6.15.post1")
    finding = next(item for item in findings if item.check == rule)
    assert finding.remedy
    if rule != "attention_by_network":  # this rule applies if something is missing
        assert "(found: " in finding.message


@pytest.mark.parametrize("rule", sorted(NEAR_MISS))
def test_rule_does_not_hit_what_is_right(rule):
    assert rule not in checks(found_of(NEAR_MISS[rule]))


#: The parts of christopherowen/spark-vllm-mxfp4-docker and eugr/spark-vllm-docker to which rules
#: apply.
RECIPE = (
    (
        "--quantization",
        "mxfp4",
        "--mxfp4-backend=CUTLASS",
        "--mxfp4-layers",
        "moe,qkv,o,lm_head",
        "--attention-backend",
        "FLASHINFER",
        "--kv-cache-dtype",
        "fp8",
    ),
    {
        "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "1",
        "VLLM_MXFP4_BACKEND": "CUTLASS",
        "VLLM_ATTENTION_BACKEND": "FLASHINFER",
    },
)


@pytest.mark.parametrize("backend", ["CUTLAS", "Cutlass", "gemv", "CUTLASS_MXFP8", "auto"])
def test_a_backend_that_the_build_lacks_is_named_before_a_start(backend):
    """A backend that the build lacks is reported before a start.

    A backend that is left to the build is no mistake."""
    for start in ((["--mxfp4-backend", backend], {}), ([], {"VLLM_MXFP4_BACKEND": backend})):
        findings = found(*start, version="0.14.0+mxfp4")
        wrong = [each for each in findings if each.severity == "error"]
        assert len(wrong) == (backend != "auto"), wrong
        for each in wrong:
            assert backend in each.message
            assert "CUTLASS, MARLIN or TRITON" in (each.remedy or "")


_TWO_CACHES = ("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0", "1")


@pytest.mark.parametrize(
    ("start", "options", "tells", "tells_not", "exactly"),
    [
        pytest.param(None, None, None, None, (), id="a good choice"),
        pytest.param(
            (("--model", "m"), {}),
            {"arch": "sm90"},
            None,
            ("attention_by_network",),
            None,
            id="Hopper has an attention with sinks of its own",
        ),
        pytest.param(
            (("--attention-backend", "auto"), {}),
            None,
            ("attention_by_network",),
            None,
            None,
            id="auto leaves the choice of the attention backend to vLLM",
        ),
        pytest.param(
            (("-ac", '{"backend": "FLASHINFER"}'), {}),
            {"flashinfer": "0.6.15"},
            ("attention_old_flashinfer",),
            ("attention_by_network",),
            None,
            id="FLASHINFER in a JSON table behind the short name of the option",
        ),
        pytest.param(
            (("-ac.backend", "FLASHINFER"), {}),
            {"flashinfer": "0.6.15"},
            ("attention_old_flashinfer",),
            None,
            None,
            id="FLASHINFER by a key behind the short name of the option",
        ),
        pytest.param(
            (("--kv-cache-dtype", "fp8", "--kv-cache-dtype", "auto"), {}),
            {"flashinfer": "0.7.2"},
            None,
            ("sink_module_shared_cache",),
            None,
            id="the last value of a repeated option counts",
        ),
        pytest.param(
            ((*_TWO_CACHES, "--attention-backend", "auto"), {}),
            {"flashinfer": "0.7.2"},
            ("sink_module_two_caches",),
            None,
            None,
            id="two caches, and vLLM chooses the attention backend",
        ),
        pytest.param(
            ((*_TWO_CACHES, "--attention-config", '{"backend": "TRITON_ATTN"}'), {}),
            {"flashinfer": "0.7.2"},
            None,
            ("sink_module_two_caches", "sink_module_shared_cache"),
            None,
            id="two caches with Triton's attention",
        ),
        pytest.param(
            (("--attention-backend", "FLASHINFER"), {}),
            {"flashinfer": "0.6.16"},
            None,
            ("attention_old_flashinfer",),
            None,
            id="FlashInfer 0.6.16 has sinks",
        ),
        pytest.param(
            (("--attention-backend", "FLASHINFER"), {}),
            {"flashinfer": "0.7.2.post1"},
            None,
            ("attention_old_flashinfer",),
            None,
            id="FlashInfer 0.7.2 has sinks",
        ),
        pytest.param(
            (("--attention-backend", "FLASHINFER"), {}),
            None,
            None,
            ("attention_old_flashinfer",),
            None,
            id="which FlashInfer is not known",
        ),
        pytest.param(
            RECIPE,
            {"flashinfer": "0.6.3", "version": "0.14.0+mxfp4"},
            None,
            None,
            ("attention_needs_network", "sink_module_shared_cache"),
            id="the effort's recipe for its own build",
        ),
        pytest.param(
            RECIPE,
            {"flashinfer": "0.6.3", "version": "0.33.0"},
            ("fork_arguments", "environment_without_effect", "attention_old_flashinfer"),
            None,
            None,
            id="the effort's recipe for a release",
        ),
        pytest.param(
            (("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0"), {}),
            {"flashinfer": "0.7.4"},
            None,
            ("sink_module_two_caches", "sink_module_shared_cache"),
            None,
            id="FlashInfer 0.7.4 names its module after the cache",
        ),
        pytest.param(
            (
                (
                    "--kv-cache-dtype",
                    "fp8",
                    "--kv-cache-dtype-skip-layers",
                    "0",
                    "--attention-backend",
                    "TRITON_ATTN",
                ),
                {},
            ),
            {"flashinfer": "0.7.2.post1"},
            None,
            ("sink_module_two_caches", "sink_module_shared_cache"),
            None,
            id="two kinds of cache, attention by Triton",
        ),
        pytest.param(
            (("--attention-backend", "flash_attn"),),
            None,
            ("attention_without_sinks",),
            None,
            None,
            id="a backend in lower case",
        ),
        pytest.param(
            (("--attention-backend=flashinfer",),),
            None,
            ("attention_needs_network",),
            None,
            None,
            id="another backend in lower case",
        ),
        pytest.param(
            (("--moe-backend", "flashinfer_trtllm"), {}),
            {"arch": "sm100"},
            None,
            ("moe_trtllm",),
            None,
            id="TRT-LLM's experts on SM100",
        ),
        pytest.param(((), {}), {"arch": "cpu"}, None, None, (), id="nothing asked of a CPU"),
        pytest.param(
            (("--mxfp4-layers", "qkv"), {}),
            {"arch": "cpu"},
            ("fork_arguments",),
            None,
            None,
            id="the effort's options on a CPU",
        ),
    ],
)
def test_findings_of_a_start(start, options, tells, tells_not, exactly):
    """Rules for a build, a release or an architecture apply only to it.

    `start` contains the arguments and the environment of the start; by default, they have no fault.
    """
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


@pytest.mark.parametrize(
    ("available_gib", "expected"),
    [
        pytest.param(
            5.0,
            ("error: node 1 (spark2): memory: expected 9.0 GiB available, got 5.0",),
            id="5.0, error: node 1 (spark2): 9.0 GiB of memory are",
        ),
        pytest.param(
            8.9,
            ("error: node 1 (spark2): memory: expected 9.0 GiB",),
            id="8.9, error: node 1 (spark2): 9.0 GiB",
        ),
        pytest.param(9.0, (), id="9.0"),
    ],
)
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


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [
        ("FLASHINFER_CUDA_ARCH_LIST", "12.1a", None),
        ("FLASHINFER_CUDA_ARCH_LIST", "9.0a 12.1f", None),
        ("FLASHINFER_CUDA_ARCH_LIST", "", None),
        ("FLASHINFER_CUDA_ARCH_LIST", "12.1", "error"),
        ("FLASHINFER_CUDA_ARCH_LIST", "12.0a", "error"),
        ("FLASHINFER_CUDA_ARCH_LIST", "12.1a,12.0f", "error"),
        ("FLASHINFER_CUDA_ARCH_LIST", "12.1 12.1a", "warning"),
        ("TORCH_CUDA_ARCH_LIST", "9.0;12.1a+PTX", None),
        ("TORCH_CUDA_ARCH_LIST", "12.1", "warning"),
    ],
)
def test_arch_lists(name, value, severity):
    findings = found(environment={name: value}, needs=Needs(arch_list=("12.1a", "12.1f")))
    assert [finding.severity for finding in findings] == [severity] * (severity is not None)
    for finding in findings:
        assert finding.check == "arch_list"
        assert repr(value) in finding.message and "12.1a" in finding.remedy
    assert found(environment={name: value}) == [], "nothing is asked"


def test_a_version_that_is_none_is_of_another_release():
    findings = found(flashinfer="0.6.14", beside={"flashinfer-cubin": "unknown"})
    assert "cubin_of_another_release_0_6" in checks(findings)
