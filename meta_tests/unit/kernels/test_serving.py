"""The kernels of the path must be tested.

Kernels that were not tested are reported, and prevent a certificate."""

import itertools

import pytest

from sm121.core import profile
from sm121.core.configuration import ServerConfiguration
from sm121.core.verdict import Inapplicable, NotRun, Verdict
from sm121.evidence.kernel_path import KernelPath, read_log
from sm121.kernels import cases, serving
from sm121.kernels.under_test import Kernels
from sm121.report import summary
from sm121.run import merge, served
from sm121.run.engine_report import EngineReport, ServedKernel
from sm121.run.shard_report import ShardReport, ShardTest
from sm121.run.verdict_file import JudgedKernel, TestReport, VerdictFile
from sm121.session import certification

GB10 = "sm121-gpt-oss-120b"
#: Lines of vLLM's log on a GB10 (tools/choices/vllm-sm121.jsonl).
MARLIN = "INFO 11-20 10:00:00 [mxfp4.py:1] Using 'MARLIN' Mxfp4 MoE backend."
W4A8 = "INFO 11-20 10:00:00 [mxfp4.py:1] Using 'FLASHINFER_CUTLASS_MXFP4_MXFP8' Mxfp4 MoE backend."
TRITON_ATTN = "INFO 11-20 10:00:00 [cuda.py:1] Using AttentionBackendEnum.TRITON_ATTN backend."
FLASHINFER = "INFO 11-20 10:00:00 [cuda.py:1] Using AttentionBackendEnum.FLASHINFER backend."
XQA = (
    "INFO 11-20 10:00:00 [flashinfer.py:967] FlashInfer resolved query dtypes: "
    "prefill=torch.bfloat16, decode=torch.bfloat16, decode_backend=xqa, "
    "kv_cache_dtype=torch.bfloat16, arch=sm121"
)
OF_THE_EFFORT = [
    "--moe-backend", "flashinfer_cutlass",
    "--quantization-config", '{"moe":{"activation":"mxfp8"}}',
]  # fmt: skip
NEEDED = ("fused_moe", "route", "prefill_attention", "decode_attention", "lm_head")


@pytest.fixture
def of_log(tmp_path):
    def read(*lines: str) -> KernelPath:
        log = tmp_path / "server.log"
        log.write_text("".join(f"{line}\n" for line in lines))
        return read_log(log)

    return read


def providers(path: KernelPath, arch: str = "sm121", engine: str = "vllm") -> dict[str, str | None]:
    choices = {name: serving.choices(engine, arch, path, name)[0] for name in serving.OPERATIONS}
    return {name: choice.provider for name, choice in choices.items() if choice.nothing is None}


def judging(operation: str, provider: str | None, verdict: str = "PASS", **more) -> TestReport:
    kernel = JudgedKernel(operation=operation, provider=provider)
    name = f"tests/test_kernel.py::test[{operation}-{provider}-{verdict}]"
    return TestReport(id=name, level="kernel", verdict=verdict, kernel=kernel, **more)


def run(path: KernelPath, *tests: TestReport, arch: str = "sm121") -> VerdictFile:
    engine = EngineReport(name="vllm", managed=True, model="m", path=path)
    file = VerdictFile(arch=arch, profile="p", started="now", engine=engine, tests=list(tests))
    file.engine.served = served.list_tested_kernels(file, path)
    return file


def of(file: VerdictFile, operation: str) -> list[ServedKernel]:
    return [kernel for kernel in file.engine.served if kernel.operation == operation]


# The choice of a provider


def test_the_provider_follows_what_a_gb10_logs(of_log):
    """The provider depends on the kernels that a GB10 logs.

    Before, Marlin and Triton were always tested."""
    assert providers(of_log(TRITON_ATTN, MARLIN)) == dict.fromkeys(NEEDED, "vllm")
    with_flashinfer = providers(of_log(FLASHINFER, XQA, MARLIN))
    assert with_flashinfer["fused_moe"] == "vllm"
    assert with_flashinfer["prefill_attention"] == "flashinfer"
    assert with_flashinfer["decode_attention"] == "flashinfer"
    effort = providers(of_log(FLASHINFER, XQA, W4A8))
    assert effort["fused_moe"] == effort["mxfp8_quantize"] == "flashinfer"
    assert effort["route"] == "vllm"


@pytest.mark.parametrize(
    ("arch", "engine", "path", "operation", "reason"),
    [
        pytest.param(
            "sm121",
            "vllm",
            {"moe": "A_NEW_ONE"},
            "fused_moe",
            "with moe A_NEW_ONE",
            id="sm121, vllm, moe A_NEW_ONE, fused_moe, with moe",
        ),
        pytest.param(
            "sm121",
            "vllm",
            {"attention": "FLEX"},
            "decode_attention",
            "with attention FLEX",
            id="sm121, vllm, attention FLEX, decode_attention, with",
        ),
        pytest.param(
            "sm121",
            "vllm",
            {},
            "fused_moe",
            "no evidence shows which moe the server uses",
            id="sm121, vllm, fused_moe, no evidence shows which moe the server uses",
        ),
        pytest.param(
            "sm121",
            "vllm",
            {"attention": "FLASH_ATTN"},
            "prefill_attention",
            "FLASH_ATTN beside Hopper",
            id="sm121, vllm, attention FLASH_ATTN, prefill_attention",
        ),
        pytest.param(
            "sm121",
            "vllm",
            {"moe": "BATCHED_MARLIN"},
            "fused_moe",
            "batched",
            id="sm121, vllm, moe BATCHED_MARLIN, fused_moe, batched",
        ),
        pytest.param(
            "cpu",
            "llama-cpp",
            {"moe": "CPU"},
            "fused_moe",
            "of llama-cpp on cpu with moe CPU",
            id="cpu, llama-cpp, moe CPU, fused_moe, of llama-cpp on cpu",
        ),
        pytest.param(
            "cpu",
            "vllm",
            {"moe": "CPU", "dtype": "float16"},
            "fused_moe",
            "with moe CPU",
            id="cpu, vllm, moe CPU dtype float16, fused_moe, with moe",
        ),
    ],
)
def test_an_operation_without_any_provider_is_not_run(arch, engine, path, operation, reason):
    (choice,) = serving.choices(engine, arch, KernelPath(**path), operation)
    assert choice.provider is None and choice.nothing is None
    assert reason in choice.why
    kernels = Kernels({operation: choice}, lambda _name: pytest.fail("must not be started"))
    every = itertools.chain(*cases.GROUPS.values())
    with pytest.raises(NotRun, match=reason) as raised:
        kernels.faults(next(case for case in every if case.operation == operation))
    assert not isinstance(raised.value, Inapplicable)


def test_an_operation_without_a_kernel_on_the_path_is_inapplicable(of_log):
    (choice,) = serving.choices("vllm", "sm121", of_log(MARLIN), "mxfp8_quantize")
    kernels = Kernels({"mxfp8_quantize": choice}, lambda _name: pytest.fail("must not be started"))
    with pytest.raises(Inapplicable, match="BF16 activations"):
        kernels.faults(cases.GROUPS["mxfp8_quantisation"][0])
    assert kernels.judged is None


@pytest.mark.parametrize(
    ("dtype", "provider"),
    [
        ("float32", "vllm-cpu-float32"),
        ("bfloat16", "vllm-cpu"),
    ],
)
def test_on_the_cpu_each_kernel_has_a_provider_of_its_precision(dtype, provider):
    """On the CPU, each kernel has a provider of its precision.

    Before, PyTorch was tested instead.
    """
    path = KernelPath(moe="CPU", attention="CPU_ATTN", dtype=dtype)
    assert providers(path, "cpu") == dict.fromkeys(NEEDED, provider)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        pytest.param(
            GB10,
            (),
            {"moe": "MARLIN", "attention": "FLASHINFER"},
            id="GB10, moe MARLIN attention FLASHINFER",
        ),
        pytest.param(
            GB10,
            ("--moe-backend", "triton"),
            {"moe": "TRITON"},
            id="GB10, --moe-backend triton, moe TRITON",
        ),
        pytest.param(
            "sm90-tiny-gpt-oss",
            ("--moe-backend", "triton"),
            {"moe": "TRITON"},
            id="sm90-tiny-gpt-oss, --moe-backend triton, moe TRITON",
        ),
        pytest.param(
            "sm90-tiny-gpt-oss",
            OF_THE_EFFORT,
            {"moe": "FLASHINFER_CUTLASS_MXFP4_MXFP8", "attention": "FLASH_ATTN"},
            id="sm90-tiny-gpt-oss, OF_THE_EFFORT, moe",
        ),
        pytest.param(
            "cpu-tiny-gpt-oss",
            ("--dtype", "float32"),
            {"moe": "CPU", "attention": "CPU_ATTN", "dtype": "float32"},
            id="cpu-tiny-gpt-oss, --dtype float32, moe CPU attention",
        ),
        pytest.param("cpu-tiny-gpt-oss", (), {"dtype": None}, id="cpu-tiny-gpt-oss, dtype None"),
    ],
)
def test_before_a_server_ran_the_path_is_expected(name, arguments, expected):
    loaded = profile.load(name).judging()
    configuration = ServerConfiguration(
        name="c", engine="vllm", model="m", served_name="m", arguments=tuple(arguments),
        python="python",
    )  # fmt: skip
    path = served.expected(loaded.path_of(loaded.under_test), configuration)
    assert {field: getattr(path, field) for field in expected} == expected


def test_logged_values_override_expected_values():
    expected = KernelPath(moe="MARLIN", attention="TRITON_ATTN")
    path = served.with_expected(KernelPath(moe="TRITON"), expected)
    assert (path.moe, path.attention) == ("TRITON", "TRITON_ATTN")


# The report


def test_a_kernel_is_judged_only_by_its_own_provider(of_log):
    path = of_log(TRITON_ATTN, MARLIN)
    verdicts = ("PASS", "FAIL", "NOT_RUN")
    file = run(path, *(judging("fused_moe", "vllm", verdict) for verdict in verdicts))
    (kernel,) = of(file, "fused_moe")
    assert (kernel.backend, kernel.judged, kernel.cases) == ("MARLIN", True, 2)
    (kernel,) = of(run(path, judging("fused_moe", "vllm-triton")), "fused_moe")
    assert (kernel.judged, kernel.cases) == (False, 0)
    assert kernel.why == (
        "vllm has the kernel that the server uses; vllm-triton was tested, "
        "but the server does not use it"
    )
    (kernel,) = of(run(of_log(FLASHINFER, W4A8), judging("fused_moe", "vllm")), "fused_moe")
    assert kernel.judged is False
    assert "vllm was tested, but the server does not use it" in kernel.why


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        pytest.param((), "none of its tests was selected", id="none of its tests was selected"),
        pytest.param(
            (judging("fused_moe", "vllm", "NOT_RUN", message="none there"),),
            "none there",
            id="judging fused_moe vllm NOT_RUN message none there, none",
        ),
        pytest.param(
            (judging("fused_moe", "vllm", "INVALID"),),
            "none of its tests passed or failed",
            id="judging fused_moe vllm INVALID, none of its tests",
        ),
        pytest.param(
            (judging("route", "vllm"),),
            "none of its tests was selected",
            id="judging route vllm, none of its tests was selected",
        ),
    ],
)
def test_reasons_why_a_kernel_was_not_judged(of_log, tests, why):
    (kernel,) = of(run(of_log(TRITON_ATTN, MARLIN), *tests), "fused_moe")
    assert (kernel.judged, kernel.why) == (False, why)


def test_layers_that_run_other_kernels_are_kernels_of_their_own():
    path = KernelPath(moe="MARLIN", also={"moe": ["TRITON"]})
    first, second = of(run(path, judging("fused_moe", "vllm")), "fused_moe")
    assert (first.backend, first.judged) == ("MARLIN", True)
    assert (second.backend, second.judged) == ("TRITON", False)


def test_an_expected_kernel_not_shown_by_a_server_is_reported():
    file = run(KernelPath(), judging("fused_moe", "vllm"))
    file.engine.served = served.list_tested_kernels(file, KernelPath(moe="MARLIN"))
    (kernel,) = of(file, "fused_moe")
    assert kernel.judged and "no server has shown it" in kernel.why


def test_the_summary_names_both(of_log):
    file = run(of_log(TRITON_ATTN, MARLIN), judging("fused_moe", "vllm"))
    text = summary.markdown(file)
    assert "| kernels tested | fused\\_moe (MARLIN) by vllm, 1 cases |" in text
    assert "| kernels not tested | route, prefill\\_attention" in text
    assert "report.html contains the reasons" in text


def test_shards_judge_the_kernels_together(of_log):
    path = of_log(TRITON_ATTN, MARLIN)
    tests = judging("fused_moe", "vllm"), judging("route", "vllm")
    planned = [ShardTest(id=test.id, level="kernel") for test in tests]
    parts = {}
    for index, test in enumerate(tests, 1):
        part = run(path if index == 1 else KernelPath(), test)
        part.shard = ShardReport(index=index, of=2, tests=planned)
        parts[f"shards/{index}"] = part
    whole = merge.merge_shards(parts)
    assert of(whole, "fused_moe")[0].judged and of(whole, "route")[0].judged


# The certificate


def certified(*tests: TestReport, levels: tuple[str, ...] = ("kernel",)) -> VerdictFile:
    """Return a run on the CPU with these tests for which a certificate was requested."""
    path = KernelPath(moe="CPU", attention="CPU_ATTN", dtype="float32")
    file = run(path, *tests, arch="cpu")
    judging = profile.load("cpu-tiny-gpt-oss").judging()
    certify = judging.certify.model_copy(update={"levels": levels, "path": ()})
    judging = judging.model_copy(update={"certify": certify})
    file.finished = True
    file.judge()
    certification.certify(file, judging, {}, deselected=[], inapplicable=set())
    return file


def test_a_kernel_that_was_not_judged_is_a_gap():
    tests = [judging(name, "vllm-cpu-float32") for name in NEEDED]
    whole = certified(*tests)
    assert whole.certified and whole.verdict is Verdict.PASS
    other = certified(judging("fused_moe", "torch"), *tests[1:])
    assert "fused_moe of moe CPU was not judged: vllm-cpu-float32 has" in other.reason
    assert not other.certified
    smoke = TestReport(id="one", level="smoke", verdict="PASS")
    assert certified(smoke, levels=("smoke",)).certified, "it does not ask for the kernel level"
