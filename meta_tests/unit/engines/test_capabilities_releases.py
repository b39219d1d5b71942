"""Releases differ in their starts, kernel paths and gates of the GB10 profile."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from sm121.checkpoint.identity import drafter_obstacle
from sm121.core import builds, engine_settings, profile
from sm121.core.errors import UsageError
from sm121.core.server import Endpoint, Server
from sm121.engines import capabilities, preflight
from sm121.engines.options import GivenEngine
from sm121.engines.request_rules import load_requests
from sm121.evidence.kernel_path import read_log
from sm121.evidence.requirement import contradictions
from sm121.run.record import Target
from sm121.session import opening, target
from sm121.session.given_judging import GivenJudging
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings

SETTINGS = Settings()
CPU = profile.load("cpu-tiny-gpt-oss")
GB10 = profile.load("sm121-gpt-oss-120b")
TARGET = Target("sm121", GB10, None)
SOURCE_BUILD = "0.1.dev16581+g0a1b2c3d4"


@pytest.mark.parametrize(
    ("version", "attention"),
    [
        ("0.24.0", "TRITON_ATTN"),
        ("0.24.0+4a1b2c3.nv26.07", "TRITON_ATTN"),
        ("0.27.1", "TRITON_ATTN"),
        ("0.28.0", "FLASHINFER"),
        ("0.28.1.dev12+g0a1b2c3", "FLASHINFER"),
        ("0.28.0rc1", "FLASHINFER"),
        ("0.34.0rc1.dev3+g0a1b2c3", "FLASHINFER"),
        ("0.33.0", "FLASHINFER"),
    ],
)
@pytest.mark.parametrize("name", ["marlin", "cutlass"])
def test_no_release_is_asked_for_what_it_refuses(name, version, attention):
    """No release gets an argument that it refuses.

    For example, FLASHINFER refuses attention sinks on SM12x before 0.28 (vllm, supports_sink)."""
    gb10 = GB10.judging(name, version)
    row = gb10.configurations[name]
    options = dict(itertools.pairwise(row.arguments))
    assert options["--attention-backend"] == attention
    assert gb10.path_of(name).attention == (attention,)
    assert ("VLLM_HAS_FLASHINFER_CUBIN" in row.environment) is (attention == "FLASHINFER")
    stock = gb10.configurations["stock"]
    assert stock.arguments == () and stock.environment == {}
    assert attention in (gb10.path_of("stock").attention or ())


def test_collect_only_needs_no_engine(tmp_path):
    """``--collect-only`` needs no engine. A run reports a missing engine when it opens."""
    settings = Settings(
        target=GivenTarget(arch="cpu", profile=CPU),
        engine=GivenEngine(python=str(tmp_path / "python")),
    )
    assert target.resolve(settings, ()).engine.version is None
    with pytest.raises(UsageError, match="--engine-python"):
        opening.prepare(dataclasses.replace(settings, report_dir=tmp_path / "report"))


def test_a_release_that_cannot_have_a_configuration_is_named():
    with pytest.raises(UsageError, match=r"configuration cutlass: expected vllm >=0.28 or .* 0.20"):
        GB10.judging("cutlass", "0.20.0")
    assert "cutlass" not in GB10.judging(None, "0.20.0").configurations
    with pytest.raises(UsageError, match="--configuration gemm: expected one of profile sm121"):
        GB10.judging("gemm")


def test_a_stock_engine_is_held_to_its_own_floor():
    """An unchanged release is judged by its own minimum: its rate passes, and a rate that is a
    tenth lower fails."""
    stock = GB10.judging("stock")
    effort = GB10.judging()
    assert (stock.question, effort.question, effort.under_test) == ("stock", None, "stock")
    assert "30.2 tok/s" in stock.asks and effort.asks is None
    published = {0: 33.55, 4096: 32.63, 8192: 31.50, 16384: 29.55, 32768: 26.65}
    for depth, rate in published.items():
        floor = stock.gate(f"tg32@d{depth}")
        goal = effort.gate(f"tg32@d{depth}")
        assert 0.89 * rate < floor.minimum < 0.93 * rate and floor.minimum < goal.minimum
        assert f"{rate:.2f}" in floor.source
    assert stock.gate("tg32@d0").minimum < 31.58  # the rate of the other machine
    for metric in ("ttft_p99", "startup_s"):
        assert stock.gate(metric) == effort.gate(metric) is not None


def seconds_of_a_prompt(tokens: int) -> float:
    """Return the prefill time of a prompt, computed from the published rates: 4,664 tok/s at depth
    0 and 1,399 at 32,768."""
    first = 1 / 4663.70
    deep = 1 / 1398.80
    return tokens * first + (deep - first) / 32768 * tokens**2 / 2


def test_limits_are_longer_than_what_is_healthy():
    """The time limits are longer than a healthy server needs.

    With a full context, the first token comes after two and a half minutes. Before, two minutes
    were allowed."""
    brim = seconds_of_a_prompt(131072)
    assert 150 < brim < 165
    assert GB10.stress.stalled_after_s.value > 1.9 * brim
    pressed = 8 * seconds_of_a_prompt(450_000 // 8)
    assert GB10.stress.request_within_s.value > 2 * pressed
    longest = GB10.performance.prompt_tokens + max(GB10.performance.depths)
    assert GB10.performance.measuring.silent_within_s > 2 * seconds_of_a_prompt(longest)
    assert GB10.test_timeout_s["stress"] > 2 * GB10.stress.request_within_s.value


def test_a_drafter_is_not_downloaded_within_the_limit_of_a_start(tmp_path):
    """A drafter is not downloaded within the time limit of a start.

    Before, cells of the matrix downloaded three Eagle3 drafters within their 300 s."""
    name = "nvidia/gpt-oss-120b-Eagle3-short-context"
    config = f'{{"method": "eagle3", "model": "{name}", "num_speculative_tokens": 3}}'
    environment = {"HF_HOME": str(tmp_path)}
    arguments = ("--speculative-config", config)
    assert f"`hf download {name}` first" in drafter_obstacle(arguments, environment)
    sglang = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", name)
    assert f"`hf download {name}` first" in drafter_obstacle(sglang, environment)
    folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "model.safetensors").touch()
    for present in (arguments, sglang, ("--speculative-config", '{"method": "ngram"}')):
        assert drafter_obstacle(present, environment) is None
    missing = ("--speculative-draft-model-path", str(tmp_path / "eagle3"))
    assert "expected a folder with a checkpoint, got none" in drafter_obstacle(missing, environment)
    own = ("--speculative-config", '{"method": "eagle3", "model": "{model}/eagle3"}')
    assert drafter_obstacle(own, environment) is None


@pytest.mark.parametrize("name", ["marlin", "cutlass"])
def test_an_unknown_build_may_have_any_path_and_gets_options_of_its_parser(name):
    """An unknown build may have any kernel path, and gets only options that its parser accepts.

    Before, it was treated as the newest release, and had to have that release's path and arguments.
    """
    for version in (SOURCE_BUILD, None):
        gb10 = GB10.judging(name, builds.identity(version))
        assert gb10.path_of(name).attention == ("FLASHINFER", "TRITON_ATTN")
    old = GB10.judging(None, None, {"--attention-backend", "--moe-backend"})
    assert "--attention-backend" in old.configurations["marlin"].arguments
    assert GB10.judging(None, None, set()).configurations.keys() == {"stock"}


BUILD = "0.14.0+mxfp4"


@pytest.mark.parametrize(
    ("version", "options", "build", "identity"),
    [
        ("0.14.0rc1.dev375+g8409484b4", None, None, "0.14.0+mxfp4"),
        ("0.14.0rc1.dev374+gaf090071b.d20260206", None, None, "0.14.0+mxfp4"),
        ("0.1.dev12770+g045293d82.d20260810", None, None, "0.14.0+mxfp4"),
        ("0.1.dev12774+g459541683", None, None, "0.14.0+mxfp4"),
        pytest.param(
            "0.1.dev12999+gfeedfac",
            ("--model", "--mxfp4-backend"),
            None,
            "0.14.0+mxfp4",
            id="0.1.dev12999+gfeedfac, --model --mxfp4-backend",
        ),
        pytest.param(
            "0.14.0",
            ("--mxfp4-layers",),
            None,
            "0.14.0+mxfp4",
            id="0.14.0, --mxfp4-layers, 0.14.0+mxfp4",
        ),
        (None, None, "mxfp4", "0.14.0+mxfp4"),
        pytest.param(
            "0.16.0rc2.dev1+gfeedfac",
            ("--mxfp4-backend",),
            None,
            "0.16.0+mxfp4",
            id="0.16.0rc2.dev1+gfeedfac, --mxfp4-backend, 0.16.0+mxfp4",
        ),
        pytest.param("0.14.0", ("--model",), None, "0.14.0", id="0.14.0, --model, 0.14.0"),
        ("0.33.0", None, None, "0.33.0"),
        pytest.param(
            "0.1.dev16581+g0a1b2c3d4",
            ("--moe-backend",),
            None,
            None,
            id="0.1.dev16581+g0a1b2c3d4, --moe-backend",
        ),
        ("0.1.dev12770+g0452", None, None, None),
        (None, None, None, None),
    ],
)
def test_a_build_is_known_by_its_commit_its_parser_or_its_log(version, options, build, identity):
    assert builds.identity(version, options, build) == identity
    gb10 = GB10.judging(None, identity, options)
    is_build = builds.named(identity) is not None
    assert gb10.under_test == ("mxfp4" if is_build else "stock")
    assert gb10.gate("tg32@d0").minimum == 52


@pytest.mark.parametrize(
    ("version", "settled"),
    [
        ("0.33.0", True),
        ("0.1.dev12770+g045293d82", True),
        ("0.14.0", False),
        ("0.14.1", False),
        ("0.24.0+nv26.07", False),
        ("0.1.dev16581+g0a1b2c3d4", False),
        (None, False),
    ],
)
def test_which_versions_settle_the_options_of_an_engine(version, settled):
    assert builds.is_settled(version) is settled


@pytest.mark.parametrize(
    ("version", "identity"),
    [
        ("b11434-0c1e570", "0.6.0+b11434"),
        ("b11434-sdist", "0.6.0+b11434"),
        ("b11434", "0.6.0+b11434"),
        ("b12000-feedfac", "0.6.0"),
        ("b11433-feedfac", None),
        ("b11434c0", None),
    ],
)
def test_a_running_llama_server_is_known_by_the_number_of_its_build(version, identity):
    """A running llama-server reports its build and not its release.

    Its known bugs are those of the release."""
    can = capabilities.capabilities_of("llama-cpp", version)
    assert can.identity == identity
    bugs = can.bugs("tests/test_correctness.py::test_a_stop_string_ends_the_text")
    assert len(bugs) == (0 if identity is None else 1)


@pytest.mark.parametrize("version", ["0.0.0", "0.0.0+cu130", "0.0", "0.1.dev1+g0a1b2c3", "dev"])
def test_a_version_without_a_release_is_unknown(version):
    assert builds.identity(version) is None and not builds.is_settled(version)


def test_each_question_that_was_asked_is_in_the_last_line():
    stock = GB10.judging("stock", "0.33.0")
    trusted = Settings(judging=GivenJudging(against=SimpleNamespace(name="trusted")))
    assert opening._question(Settings(), GB10.judging(None, "0.33.0")) is None
    question = opening._question(trusted, GB10.judging(None, "0.33.0"))
    assert question == "is it not worse than trusted"
    both = opening._question(trusted, stock)
    assert both.startswith("is it not worse than trusted, and is it as fast as configuration stock")


def test_a_configuration_that_a_build_lacks_is_refused_with_what_it_has():
    with pytest.raises(UsageError, match=r"expected the GB10 effort's own build \(--mxfp4-backend"):
        GB10.judging("mxfp4", "0.33.0")
    with pytest.raises(UsageError, match=r"own build, vllm 0.14.0.mxfp4, which has mxfp4, mxfp4-8"):
        GB10.judging("cutlass", BUILD)
    with pytest.raises(UsageError, match="an unknown release, which has stock"):
        GB10.judging("mxfp4", None, {"--moe-backend"})
    assert GB10.judging("mxfp4").under_test == "mxfp4"  # the server reports no version
    checkout = "0.14.0rc1.dev380+gdeadbee12"  # a build of a release at an unknown commit
    assert GB10.judging("mxfp4", checkout).under_test == "mxfp4"
    assert GB10.judging(None, checkout).under_test == "stock"
    for lacks in (("mxfp4", "0.14.1"), ("mxfp4", "0.33.1.dev5+gdeadbee12"), ("marlin", checkout)):
        with pytest.raises(UsageError, match="which has stock"):
            GB10.judging(*lacks)
    with pytest.raises(UsageError, match="which has stock"):  # the parser's options are known
        GB10.judging("mxfp4", checkout, {"--port"})


@pytest.mark.parametrize(
    ("version", "identity"),
    [
        ("0.14.0rc1.dev375+g8409484b4", None),
        ("0.1.dev12770+g045293d82.d20260810", None),
        # the build is recognised by its parser's options
        ("0.14.0rc1.dev380+gdeadbee12", "0.14.0+mxfp4"),
        # the build is recognised by its log
        ("0.1.dev16581+g0a1b2c3d4", "0.14.0+mxfp4"),
    ],
)
def test_a_build_s_own_bug_is_known_whatever_its_version_says(version, identity):
    def builds_of(version, identity):
        bugs = capabilities.capabilities_of("vllm", version, identity=identity).bugs("test_load")
        return [bug.build for bug in bugs if bug.build]

    assert builds_of(version, identity) == ["mxfp4"]
    assert builds_of("0.14.1", None) == builds_of(SOURCE_BUILD, None) == []


def test_a_build_has_the_bugs_and_abilities_of_its_base_release():
    can = capabilities.capabilities_of("vllm", "0.1.dev12770+g045293d82.d20260810")
    assert can.can("regex") and can.deviation("wrong-key", "no_error_object")
    assert can.bugs("tests/test_correctness.py::test_regex_is_kept")
    assert not capabilities.capabilities_of("vllm", SOURCE_BUILD).bugs("test_regex_is_kept")
    quiet = {"needs": engine_settings.Needs(), "directory": Path()}
    for version in (BUILD, "0.33.0"):
        variables = {"VLLM_MXFP4_BACKEND": "CUTLASS"}
        start = preflight.Preflight("sm121", (), variables, version=version, **quiet)
        checks = [each.check for each in start.findings()]
        assert ("environment_without_effect" in checks) is (version != BUILD)
    misspelt = ("--mxfp4-backend", "CUTLAS")
    findings = preflight.Preflight("sm121", misspelt, {}, version=BUILD, **quiet).findings()
    assert (findings[0].check, findings[0].severity) == ("mxfp4_backend_unknown", "error")


def attached(tmp_path, version, *lines):
    log = tmp_path / "server.log"
    core = "(EngineCore pid=7) INFO 10-05 02:13:33 "
    log.write_text("\n".join(core + line for line in lines) + "\n")
    return Server(
        endpoint=Endpoint("http://127.0.0.1:1", "", "gpt-oss-120b"), managed=False, engine="vllm",
        version=version, log=log, configuration=None, startup_s=None, reader="vllm",
    )  # fmt: skip


def log_of(version, attention, moe, *more):
    engine = f"[core.py:133] Initializing a V1 LLM engine (v{version}) with config: model='m', x=1"
    backends = f"{attention} attention backend out of potential backends: ['{attention}']"
    if attention == "FLASHINFER":
        backends = f"AttentionBackendEnum.{attention} backend"
    moe_line = f"[mxfp4.py:499] Using '{moe}' Mxfp4 MoE backend."
    return engine, f"[cuda.py:507] Using {backends}.", *more, moe_line


LBNHC = "[utils.py:347] Using LBNHC KV cache layout."
LBHNC = LBNHC.replace("LBNHC", "LBHNC")


@pytest.mark.parametrize(
    ("version", "lines", "configuration"),
    [
        pytest.param(
            "0.33.0",
            ("TRITON_ATTN", "MARLIN", "[utils.py:347] Using LBNHC KV cache layout."),
            "stock",
            id="0.33.0, TRITON_ATTN MARLIN (utils.py:347) Using LBNHC",
        ),
        pytest.param(
            "0.33.0",
            ("FLASHINFER", "MARLIN", "[utils.py:347] Using LBNHC KV cache layout."),
            "stock",
            id="0.33.0, FLASHINFER MARLIN (utils.py:347) Using LBNHC KV",
        ),
        pytest.param(
            "0.24.0", ("TRITON_ATTN", "MARLIN"), "stock", id="0.24.0, TRITON_ATTN MARLIN, stock"
        ),
        pytest.param(
            "0.28.0", ("TRITON_ATTN", "MARLIN"), "stock", id="0.28.0, TRITON_ATTN MARLIN, stock"
        ),
        pytest.param(
            "0.33.0",
            (
                "FLASHINFER",
                "FLASHINFER_CUTLASS_MXFP4_MXFP8",
                "[utils.py:347] Using LBHNC KV cache layout.",
            ),
            "cutlass",
            id="0.33.0, FLASHINFER FLASHINFER_CUTLASS_MXFP4_MXFP8",
        ),
        pytest.param(
            "0.1.dev16581+g0a1b2c3d4",
            (
                "FLASHINFER",
                "FLASHINFER_CUTLASS_MXFP4_MXFP8",
                "[utils.py:347] Using LBHNC KV cache layout.",
            ),
            "cutlass",
            id="0.1.dev16581+g0a1b2c3d4, FLASHINFER",
        ),
        pytest.param(
            "0.1.dev16581+g0a1b2c3d4",
            ("TRITON_ATTN", "MARLIN", "[utils.py:347] Using LBNHC KV cache layout."),
            "stock",
            id="0.1.dev16581+g0a1b2c3d4, TRITON_ATTN MARLIN",
        ),
    ],
)
def test_an_attached_server_is_judged_by_the_configuration_that_it_is(
    tmp_path, version, lines, configuration
):
    """An attached server is judged by the configuration that it has.

    Before, a healthy default server of 0.33, attached with its log, failed because of the layout
    LBNHC and the rules of the configuration under test."""
    server = attached(tmp_path, version, *log_of(version, *lines))
    gb10 = target.judging_attached(SETTINGS, TARGET, server).profile
    assert gb10.under_test == configuration
    path = read_log(server.log, "vllm")
    log = server.log
    assert not contradictions(gb10.path_of(configuration), path, log, configuration)


@pytest.mark.parametrize(
    ("asked", "lines", "said"),
    [
        pytest.param(
            None,
            ("TRITON_ATTN", "EMULATION", "[utils.py:347] Using LBNHC KV cache layout."),
            "moe: expected MARLIN, got EMULATION",
            id="TRITON_ATTN EMULATION (utils.py:347) Using LBNHC KV",
        ),
        pytest.param(
            None,
            (
                "FLASHINFER",
                "FLASHINFER_CUTLASS_MXFP4_BF16",
                "[utils.py:347] Using LBHNC KV cache layout.",
            ),
            "moe: expected MARLIN",
            id="FLASHINFER FLASHINFER_CUTLASS_MXFP4_BF16 (utils.py:347)",
        ),
        pytest.param(
            "cutlass",
            ("TRITON_ATTN", "MARLIN", "[utils.py:347] Using LBNHC KV cache layout."),
            "attention: expected FLASHINFER",
            id="cutlass, TRITON_ATTN MARLIN (utils.py:347) Using LBNHC",
        ),
    ],
)
def test_a_sick_attached_server_matches_nothing(tmp_path, asked, lines, said):
    server = attached(tmp_path, "0.33.0", *log_of("0.33.0", *lines))
    settings = Settings(target=GivenTarget(configuration=asked))
    gb10 = target.judging_attached(settings, TARGET, server).profile
    assert gb10.under_test == (asked or "stock")
    wrong = contradictions(
        gb10.path_of(gb10.under_test), read_log(server.log, "vllm"), server.log, gb10.under_test
    )
    assert said in "; ".join(map(str, wrong))


OPENAPI = {
    "paths": {"/v1/responses": {}},
    "components": {
        "schemas": {
            "CompletionRequest": {
                "properties": {"return_token_ids": {}, "structured_outputs": {}, "bad_words": {}}
            },
            "ChatCompletionRequest": {"properties": {"return_token_ids": {}}},
            "ResponsesRequest": {"properties": {"tools": {}}},
        }
    },
}


def test_abilities_of_a_checkout_come_from_its_openapi():
    """The abilities of a source checkout are read from its openapi.json.

    `0.1.dev16581` sorts before every release, and before, it was treated as the newest one."""
    offers = capabilities.offered(OPENAPI)
    checkout = capabilities.capabilities_of("vllm", SOURCE_BUILD, offers=offers)
    for can in (checkout, capabilities.capabilities_of("vllm", "0.33.0")):
        assert [name for name in capabilities.NAMES if not can.can(name)] == ["prefix_cache_reset"]
    silent = capabilities.capabilities_of("vllm", SOURCE_BUILD)
    assert "its /openapi.json cannot be read" in silent.missing("token_ids")
    fewer = capabilities.capabilities_of("vllm", SOURCE_BUILD, offers=offers - {"/v1/responses"})
    assert "lacks /v1/responses" in fewer.missing("responses") and fewer.can("responses_tools")
    for deviation in silent.file.deviations:
        assert silent.deviation(deviation.case, deviation.kind) is None
    old = next(r for r in load_requests("vllm").request if r.id == "attention_backend_variable")
    new = next(r for r in load_requests("vllm").request if r.id == "moe_backend")
    assert new.covers(SOURCE_BUILD) and not old.covers(SOURCE_BUILD)
