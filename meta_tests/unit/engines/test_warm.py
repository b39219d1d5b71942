"""``sm121 warm`` lists missing modules first, compiles them within the memory, and reports those
that it cannot compile."""

import fnmatch
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from meta_tests.texts import text_file
from sm121 import cli
from sm121.compilation import jit
from sm121.core import package_probe, profile
from sm121.core.engine_settings import Needs
from sm121.engines import registry
from sm121.engines.warm import RequiredModules

SPARK = "sm121-gpt-oss-120b"
VERSION = package_probe.find_packages(["flashinfer"])["flashinfer"][1]


class Machine:
    """An empty cache, and replacements for nvcc, ninja and a compiler that compile nothing."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.cache = folder / "base" / ".cache" / "flashinfer"
        self.tools = folder / "cuda" / "bin"
        self.tools.mkdir(parents=True)
        for name in ("nvcc", "ninja"):
            (self.tools / name).touch(0o755)
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(folder / "base"))
        monkeypatch.setenv("CUDA_HOME", str(folder / "cuda"))
        monkeypatch.setenv("PATH", str(self.tools))
        monkeypatch.delenv("MAX_JOBS", raising=False)

    def memory(self, monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
        monkeypatch.setattr(
            "psutil.virtual_memory", lambda: type("Memory", (), {"available": gib * 2**30})()
        )
        monkeypatch.setattr("os.cpu_count", lambda: 20)

    def python(self, broken: str = "") -> str:
        file = self.folder / "python"
        text = text_file("compiler-of-nothing.txt").format(
            python=sys.executable, log=str(self.folder / "log"), broken=broken, version=VERSION
        )
        file.write_text(text)
        file.chmod(0o755)
        return str(file)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path, monkeypatch)
    made.memory(monkeypatch, 112)
    return made


def warm(*arguments: str) -> int:
    return cli.main(["warm", "--profile", SPARK, "--configuration", "cutlass", *arguments])


def test_a_dry_run_lists_missing_modules_and_compiles_nothing(machine, capsys):
    assert warm("--dry-run") == 0
    output = capsys.readouterr().out
    for name in profile.load(SPARK).engine.needs.jit_modules:
        needed = not name.endswith("_fp8") and "drafts" not in name
        assert (f"  {name} (" in output) is needed, output
    assert "65.0 minutes of one core; MAX_JOBS=11, 9.3 GiB a job" in output, "(112 - 4) / 9.3"
    assert "Triton" in output and "Start it once" in output
    assert not machine.cache.exists()


def test_missing_modules_are_compiled_within_the_memory(machine, capsys, monkeypatch):
    words = ("--engine-python", machine.python(), "--module", "xqa_decode")
    assert warm(*words) == 0
    ((module, environment),) = [
        json.loads(line) for line in (machine.folder / "log").read_text().splitlines()
    ]
    assert module == "xqa_decode" and environment["MAX_JOBS"] == "20", "one a core"
    assert environment["FLASHINFER_NVCC_THREADS"] == "1"
    assert environment["FLASHINFER_CUDA_ARCH_LIST"] == "12.1a"
    assert "xqa_decode: compiled" in capsys.readouterr().out
    assert warm(*words) == 0, "it is there now"
    assert len((machine.folder / "log").read_text().splitlines()) == 1
    assert "): compiled" in capsys.readouterr().out
    words = ("--engine-python", machine.python(), "--module", "fp4_quantize")
    assert warm(*words, "--engine-env", "MAX_JOBS=3") == 0
    last = json.loads((machine.folder / "log").read_text().splitlines()[-1])
    assert last[1]["MAX_JOBS"] == "3", "what the user gave stays"


def needed_by(configuration: str, version: str | None = VERSION) -> dict[str, str]:
    """Return the attention modules that a start needs, and their name patterns in the cache."""
    judged = profile.load(SPARK).judging(configuration)
    chosen = judged.configurations[configuration]
    settings = next((each for each in chosen.settings if each.arguments), None)
    arguments = (*chosen.arguments, *(settings.arguments if settings is not None else ()))
    modules = jit.needed(judged.engine.needs, arguments, {}, version)
    named = {}
    for module in modules:
        if "sink" in module.name or "xqa" in module.name:
            named[module.name] = module.module
    return named


SINKS_FP8 = {"attention_sink_window_fp8", "attention_sink_full_fp8"}
XQA_FP8 = {"xqa_decode_fp8", "xqa_full_fp8"}


@pytest.mark.parametrize(
    ("configuration", "version", "modules"),
    [
        pytest.param("mxfp4", "0.6.3", SINKS_FP8, id="mxfp4"),
        pytest.param("mxfp4-8", "0.6.3", SINKS_FP8, id="mxfp4-8"),
        pytest.param("linear-fp8", "0.7.2.post1", SINKS_FP8 | XQA_FP8, id="linear-fp8"),
        pytest.param(
            "cutlass",
            "0.7.2.post1",
            {name.removesuffix("_fp8") for name in SINKS_FP8 | XQA_FP8},
            id="a-BF16-cache",
        ),
    ],
)
def test_each_configuration_gets_the_attention_that_it_calls(configuration, version, modules):
    assert set(needed_by(configuration, version)) == modules


@pytest.mark.parametrize(("arguments", "page"), [([], 16), (["--block-size", "64"], 64)])
def test_xqa_is_built_for_the_page_of_the_engine(arguments, page):
    needs = profile.load(SPARK).engine.needs
    modules = {
        m.name: m.module for m in jit.needed(needs, ["--kv-cache-dtype=fp8", *arguments], {})
    }
    assert jit.Decoding.of(arguments) == jit.Decoding(page=page, queries=1)
    name = f"xqa_input_bf16_kv_cache_e4m3_output_bf16_page_size_{page}_head_dim_64_"
    assert modules["xqa_decode_fp8"].startswith(name)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--attention-backend", "flashinfer"],
        ["--attention-backend", "auto"],
        ["-ac", '{"backend": "FLASHINFER"}'],
    ],
    ids=["lower-case", "auto", "json"],
)
def test_modules_of_flashinfer_are_needed_however_it_is_chosen(arguments):
    needs = profile.load(SPARK).engine.needs
    modules = jit.needed(needs, ["--kv-cache-dtype=fp8"], {})
    assert modules and jit.needed(needs, ["--kv-cache-dtype=fp8", *arguments], {}) == modules


@pytest.mark.parametrize(
    ("release", "counts"),
    [("0.7.4+cu130", True), ("0.7.2+cu130", False)],
    ids=["of-flashinfers-release", "of-another-release"],
)
def test_kernels_that_flashinfer_ignores_do_not_count(monkeypatch, tmp_path, release, counts):
    packages = {"flashinfer": "0.7.4", "flashinfer_jit_cache": release, "flashinfer_cubin": None}
    found = {name: (str(tmp_path / name), version) for name, version in packages.items()}
    for name in packages:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(jit.interpreter, "packages", lambda *_arguments: found)
    monkeypatch.setattr(jit.interpreter, "unmet_requirements", lambda *_arguments: ())
    ahead = jit.FlashInferModules.of(sys.executable, {}).ahead
    assert (tmp_path / "flashinfer_jit_cache" in ahead) is counts


DRAFTS = [
    pytest.param(["--speculative-config", '{"method": "eagle3", "num_speculative_tokens": 3}'], 4,
                 id="a JSON object"),
    pytest.param(["--speculative-config.num_speculative_tokens=5"], 6, id="a dotted name"),
]  # fmt: skip


@pytest.mark.parametrize("cache", ["bf16", "e4m3"])
@pytest.mark.parametrize(("arguments", "queries"), DRAFTS)
def test_xqa_is_built_for_the_drafts_that_the_engine_decodes(arguments, queries, cache):
    """XQA is built for the number of drafts that the engine uses.

    Before, the first start compiled this module, because XQA has one for each number of queries."""
    needs = profile.load(SPARK).engine.needs
    fp8 = ["--kv-cache-dtype", "fp8"] if cache == "e4m3" else []
    for given in ([*arguments, *fp8], [*fp8, *arguments]):
        modules = [m.module for m in jit.needed(needs, given, {}, "0.7.4") if "xqa" in m.module]
        drafts = {name for name in modules if name.endswith(f"True_spec_q_seq_len_{queries}")}
        assert len(drafts) == 2 and len(modules) == 4, (
            "with a window and without; one query as well"
        )
        for name in modules:
            assert f"kv_cache_{cache}_" in name


def test_without_drafts_no_module_is_built_for_them():
    needs = profile.load(SPARK).engine.needs
    assert not [m.name for m in jit.needed(needs, [], {}, "0.7.4") if "drafts" in m.name]


@pytest.mark.parametrize(
    ("cached", "said"),
    [
        pytest.param("fused_moe_120_M64N64_mxfp4min", False, id="compiled before"),
        pytest.param("fused_moe_120", True, id="a release's experts"),
        pytest.param(None, True, id="an empty cache"),
    ],
)
def test_experts_that_are_not_built_are_named(machine, capsys, monkeypatch, cached, said):
    """Experts that are not built are reported.

    The MXFP4 build compiles its own experts at the first start, even after `sm121 warm`."""
    if cached is not None:
        folder = machine.cache / VERSION / "121a" / "cached_ops" / cached
        folder.mkdir(parents=True)
        (folder / f"{cached}.so").touch()
    build = registry.Installed("0.14.0rc1.dev375+g8409484b4", None)
    monkeypatch.setattr(registry, "installed", lambda *_arguments: build)
    assert cli.main(["warm", "--profile", SPARK, "--configuration", "mxfp4", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert ("not compiled here: experts_mxfp4 (fused_moe_120*_mxfp4min), " in output) is said
    assert "  experts (" not in output, "a release's experts are of no use to it"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        pytest.param(["--mxfp4-backend", "CUTLASS"], ["experts_mxfp4"], id="the MXFP4 build"),
        pytest.param(["--mxfp4-backend=MARLIN"], [], id="its Marlin"),
        pytest.param(DRAFTS[0].values[0], ["drafter"], id="a drafter"),
        pytest.param(
            ["--speculative-config", '{"method": "ngram"}'], [], id="drafts of the prompt"
        ),
        pytest.param([], [], id="a release"),
    ],
)
def test_modules_that_a_start_compiles_in_addition(arguments, names):
    assert [each.name for each in jit.unbuilt(arguments)] == names


@pytest.mark.parametrize(
    ("cache", "stale", "there"),
    [
        pytest.param("__nv_fp8_e4m3", False, True, id="of-this-cache"),
        pytest.param("nv_bfloat16", False, False, id="of-the-other-cache-under-the-same-name"),
        pytest.param("__nv_fp8_e4m3", True, False, id="sources-newer-than-the-library"),
        pytest.param(None, False, False, id="without-its-sources"),
    ],
)
def test_a_sink_module_is_there_only_for_its_own_cache(tmp_path, cache, stale, there):
    """A module of the sink wrapper counts only for its own type of cache.

    Before, a module for a BF16 cache counted for an FP8 cache, and the first start compiled again.
    """
    name = "batch_prefill_attention_sink_bf16_swa_True_fa2"
    library = tmp_path / "0.7.2" / "121a" / "cached_ops" / name / f"{name}.so"
    library.parent.mkdir(parents=True)
    library.touch()
    if cache is not None:
        config = tmp_path / "0.7.2" / "121a" / "generated" / name / "batch_prefill_config.inc"
        config.parent.mkdir(parents=True)
        config.write_text(f"using DTypeKV = {cache};\n")
        written = library.stat().st_mtime + (10 if stale else -10)
        os.utime(config, (written, written))
    needs = Needs(jit_modules=("attention_sink_window_fp8",))
    (module,) = jit.needed(needs, ["--kv-cache-dtype", "fp8"], {})
    modules = jit.FlashInferModules("0.7.2", tmp_path)
    assert (modules.missing([module], ["121a"], 121) == []) is there


@pytest.mark.parametrize(
    ("version", "both"),
    [
        pytest.param("0.7.2.post1", False, id="one-name-for-both-caches"),
        pytest.param("0.7.4", True, id="a-name-for-each-cache"),
    ],
)
def test_the_configuration_under_test_is_warm_where_two_share_a_name(monkeypatch, version, both):
    """If two configurations share a module's name, the module of the configuration under test is
    built.

    With the baseline's module, the start of the configuration under test would compile."""
    monkeypatch.setattr(
        jit.FlashInferModules,
        "of",
        lambda *_arguments: jit.FlashInferModules(version, Path("/nowhere")),
    )
    names = {m.name for m in RequiredModules.of(profile.load(SPARK), sys.executable, {},
                                       configuration="linear-fp8").needed}  # fmt: skip
    assert names >= SINKS_FP8
    assert ("attention_sink_window" in names) is both


def test_a_failed_module_is_reported_and_the_others_are_compiled(machine, capsys):
    status = warm(
        "--engine-python", machine.python(broken="fp4_quantize"),
        "--module", "fp4_quantize", "--module", "xqa_decode",
    )  # fmt: skip
    output = capsys.readouterr().out
    assert status == 1
    assert "RuntimeError: Ninja build failed." in output and "missing: fp4_quantize" in output
    assert "xqa_decode: compiled" in output


@pytest.mark.parametrize(
    ("gib", "tool", "why"),
    [
        (112, "nvcc", "there is no nvcc"),
        (112, "ninja", "there is no ninja (PATH)"),
        (12, None, "9.3 GiB for a compile job"),
    ],
)
def test_modules_that_cannot_be_compiled_here_have_a_reason(
    machine, capsys, monkeypatch, gib, tool, why
):
    machine.memory(monkeypatch, gib)
    if tool:
        (machine.tools / tool).unlink()
    assert warm("--engine-python", machine.python(), "--module", "experts") == 1
    output = capsys.readouterr().out
    assert why in output and "missing: experts" in output
    assert not machine.cache.exists()


def test_modules_of_another_architecture_count_as_missing(machine, capsys):
    arguments = ("--module", "xqa_decode", "--engine-env", "FLASHINFER_CUDA_ARCH_LIST=12.0a")
    assert warm("--engine-python", machine.python(), *arguments) == 1
    output = capsys.readouterr().out
    assert "expected xqa_" in output and "121a" in output and "/120a/cached_ops/" in output


@pytest.mark.parametrize(("jobs", "status"), [("11", 0), ("12", 1), ("many", 1)])
def test_jobs_that_do_not_fit_are_refused(machine, capsys, monkeypatch, jobs, status):
    """Compile jobs that do not fit into the memory are refused. eugr's images set MAX_JOBS=16,
    which needs more memory than a Spark has."""
    monkeypatch.setenv("MAX_JOBS", jobs)
    assert warm("--engine-python", machine.python(), "--module", "experts") == status
    output = capsys.readouterr().out
    assert (status == 0) != (f"got {jobs}. Give --engine-env MAX_JOBS=11" in output)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ("--profile", "cpu-tiny-gpt-oss"),
            "got a profile that needs no module of FlashInfer",
            id="--profile cpu-tiny-gpt-oss, no module of FlashInfer",
        ),
        pytest.param(
            ("--profile", "sm121-gpt-oss-120b", "--module", "experts"),
            "module experts: expected one of sampling, attention",
            id="--profile sm121-gpt-oss-120b --module experts, module",
        ),
        pytest.param(
            ("--profile", "sm121-gpt-oss-120b", "--configuration", "gemm"),
            "--configuration gemm: expected one of",
            id="--profile sm121-gpt-oss-120b --configuration gemm",
        ),
        pytest.param(
            ("--profile", "sm121-gpt-oss-120b", "--configuration", "cutlass", "--module", "gemm"),
            "module gemm: expected one of sampling, attention_sink_window,",
            id="--profile sm121-gpt-oss-120b --configuration cutlass",
        ),
        pytest.param(
            ("--profile", "sm121-gpt-oss-120b", "--configuration", "x"),
            "expected one of profile",
            id="--profile sm121-gpt-oss-120b --configuration x",
        ),
        pytest.param(
            ("--profile", "sm121-gpt-oss-120b", "--engine-env", "MAX_JOBS"),
            "expected KEY=VALUE",
            id="--profile sm121-gpt-oss-120b --engine-env MAX_JOBS",
        ),
        pytest.param(
            ("--profile", "sm121-gpt-oss-120b", "--engine-python", "/nowhere/python"),
            "/nowhere/python",
            id="--profile sm121-gpt-oss-120b --engine-python",
        ),
    ],
)
def test_a_wrong_request_is_one_line(machine, capsys, arguments, expected):
    assert cli.main(["warm", *arguments]) == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("sm121 warm: ") and expected in line


def test_baseline_alone_needs_no_experts(machine):
    chosen = profile.load(SPARK)
    for name in ("stock", "marlin"):
        judged = chosen.judging(name)
        names = {module.name for module in RequiredModules.of(judged, sys.executable, {}).needed}
        assert names and "experts" not in names


def test_the_sampler_is_compiled_unless_it_is_switched_off(machine, capsys):
    """The sampler's module is compiled unless it is switched off.

    vLLM samples once at every start, with FlashInfer unless VLLM_USE_FLASHINFER_SAMPLER=0."""
    assert cli.main(["warm", "--profile", SPARK, "--dry-run"]) == 0
    assert "  sampling (" in capsys.readouterr().out
    switched_off = ("--engine-env", "VLLM_USE_FLASHINFER_SAMPLER=0")
    assert cli.main(["warm", "--profile", SPARK, "--dry-run", *switched_off]) == 0
    assert "  sampling (" not in capsys.readouterr().out


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "toolkit"
    (folder / "bin").mkdir(parents=True)
    for name in ("nvcc", "c++"):
        (folder / "bin" / name).write_text(
            text_file("nvcc-of-nothing.txt").format(python=sys.executable)
        )
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(folder))
    monkeypatch.setenv("CXX", str(folder / "bin" / "c++"))
    path = (folder / "bin", Path(sys.executable).parent, os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, path)))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "12.1a")
    return tmp_path


QUERIES = 4


def built_by_flashinfer(name: str) -> str:
    """Return the name of the module that the installed FlashInfer builds."""
    script = Path(jit.__file__).parent / "in_flashinfer" / "sm121_units.py"
    request = {"ask": "build", "module": name, "queries": QUERIES}
    command = [sys.executable, str(script), json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library = Path(json.loads(done.stdout.splitlines()[-1])["library"])
    assert library.is_file()
    return library.parent.name


@pytest.mark.slow("FlashInfer writes its sources")
def test_flashinfer_itself_builds_the_sampler(toolkit):
    assert built_by_flashinfer("sampling") == "sampling"


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.6.12", "0.6.16", "0.7.2", "0.7.4"])
def test_each_release_of_flashinfer_builds_its_modules(toolkit, release, monkeypatch):
    """Each release of FlashInfer builds its modules with its own generators.

    Before 0.7, they need another argument.

    The test downloads a wheel.
    """
    wheel = f"flashinfer-python=={release}"
    get = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(toolkit), wheel]
    subprocess.run(get, check=True)
    for file in toolkit.glob("*.whl"):
        zipfile.ZipFile(file).extractall(toolkit / "site")
    monkeypatch.setenv("PYTHONPATH", str(toolkit / "site"))
    for module in jit.load_jit().module:
        pattern = jit.Decoding(page=16, queries=QUERIES).in_name(module.module)
        assert fnmatch.fnmatchcase(built_by_flashinfer(module.name), pattern)
