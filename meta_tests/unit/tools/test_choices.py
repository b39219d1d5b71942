"""The profile, the matrix and the signatures agree with the choices of releases on a GB10.

The releases' refusals and choices are in ``tools/choices/vllm-sm121.jsonl`` (made by ``python -m
tools.choices``)."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from meta_tests.folders import ROOT
from sm121 import engines
from sm121.core import builds, versions
from sm121.core import profile as profiles
from sm121.core.profile import Profile
from sm121.evidence.kernel_path import read_log
from sm121.matrix import axes
from tools.choices import __main__ as choices
from tools.choices import data, page
from tools.choices.data import Release

KNOWN = data.load()
GB10 = profiles.load("sm121-gpt-oss-120b")
VERSIONS = [release.version for release in KNOWN]
#: vLLM reads the drafter's configuration if these options are given, and the machine that executed
#: the cases had no drafter.
_OF_A_DRAFTER = "speculative_config."
IN_ENGINE = Path(engines.__file__).parent / "in_engine"


def never_asked(release: Release, arguments: Sequence[str]) -> list[str]:
    """Return the parts of a start with which the release was not executed."""
    pairs = data.values(arguments)
    answers = [(answer.kind, data.values(answer.arguments)) for answer in release.answers]
    options = set()
    for kind, others in answers:
        if kind == "option":
            options.update(others)
    for kind in data.DECIDING:
        options.update(data.deciding(kind, pairs))
    unknown = []
    for name in pairs:
        if name not in options and not name.startswith(_OF_A_DRAFTER):
            unknown.append(name)
    for kind in data.DECIDING:
        deciding = data.deciding(kind, pairs)
        if deciding and (kind, deciding) not in answers:
            unknown.append(" ".join(deciding))
    return unknown


def asked_for_in_vain(profile: Profile) -> list[str]:
    """Return a profile's requests to releases that refuse them, or were not executed with them."""
    lines = []
    # These releases were executed only to read their parsers.
    bases = [build.release for build in builds.shipped()]
    for release in (release for release in KNOWN if release.version not in bases):
        for name, configuration in profile.configurations.items():
            if (start := configuration.at(release.version)) is None:
                continue
            arguments = (*profile.engine.arguments, *start.arguments)
            environment = {**profile.engine.environment, **start.environment}
            refused = data.refusals(release, arguments, environment)
            lines += [f"{name}: {refusal.message}" for refusal in refused]
            lines += [
                f"{name}: vLLM {release.version} was never asked for {option}: "
                "run `python -m tools.choices`"
                for option in never_asked(release, arguments)
            ]
    return lines


def test_the_profile_asks_no_release_for_what_it_refuses():
    assert asked_for_in_vain(GB10) == []


@pytest.mark.parametrize(
    "build", [row for row in builds.shipped() if row.engine == "vllm"], ids=lambda row: row.name
)
def test_the_profile_asks_no_build_for_what_its_parser_refuses(build):
    identity = f"{build.release}+{build.name}"
    starts = [start for c in GB10.configurations.values() if (start := c.at(identity))]
    assert starts
    for start in starts:
        arguments = (*GB10.engine.arguments, *start.arguments)
        assert data.refusals(data.at(KNOWN, identity), arguments, start.environment) == []


@pytest.mark.parametrize(
    "name", [name for name in profiles.shipped() if profiles.load(name).arch == "sm121"]
)
def test_no_profile_of_a_gb10_asks_for_what_is_refused(name):
    """No GB10 profile requests an option that its releases refuse.

    The options that depend on the canary's size (cache blocks, graph sizes) were not executed, so
    they are not checked."""
    assert [line for line in asked_for_in_vain(profiles.load(name)) if "never" not in line] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_the_choices_of_a_release_are_those_of_the_profile(version):
    """A healthy machine passes the kernel path with each configuration, and without arguments."""
    expected = {
        name: served for name, c in GB10.configurations.items() if (served := c.at(version))
    }
    judged = 0
    for answer in data.at(KNOWN, version).answers:
        name = "stock" if answer.kind == "nothing" else answer.kind.removeprefix("configuration ")
        if name not in expected:
            continue
        judged += 1
        start = f"vLLM {version}, {answer.kind}, {answer.machine}"
        assert answer.refused is None, start
        path = expected[name].path
        for accepted, value in (
            (path.attention, answer.attention),
            (path.moe, answer.experts),
            (path.kv_layout, answer.layout),
        ):
            assert accepted is None or value in accepted, (start, value, accepted)
    assert judged > len(expected)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        pytest.param(
            ("--attention-backend", "FLASHINFER"), {},
            "vLLM 0.24.0 refuses --attention-backend FLASHINFER", id="attention",
        ),
        pytest.param(
            ("--moe-backend", "flashinfer_cutlass"), {},
            "refuses --moe-backend flashinfer_cutlass", id="experts",
        ),
        pytest.param(
            (), {"VLLM_KV_CACHE_LAYOUT": "LBHNC"}, "Valid options: ['NHD', 'HND']", id="layout"
        ),
        pytest.param(
            ("--moe-backend", "unheard_of"), {}, "was never asked for moe_backend", id="unknown",
        ),
        pytest.param(
            ("--unheard-of", "1"), {}, "was never asked for unheard_of", id="unknown option"
        ),
    ],
)  # fmt: skip
def test_a_planted_configuration_is_seen(arguments, environment, words):
    update = {"arguments": arguments, "environment": environment}
    planted = GB10.configurations["stock"].model_copy(update=update)
    bad = GB10.model_copy(update={"configurations": {"planted": planted}})
    assert any(words in line for line in asked_for_in_vain(bad))


def test_the_matrix_asks_no_release_for_what_it_refuses():
    settings = []
    for name, axis in axes.load("sm121").axes.items():
        for value, choice in axis.values.items():
            for setting in choice.settings:
                if setting.engine == "vllm" and setting.build is None:
                    settings.append((f"{name}={value}", setting))
    # CUTLASS is always requested together with the activations that it needs.
    with_it = {"moe=cutlass": ["--quantization-config.moe.activation", "mxfp8"]}
    refused = []
    for release in KNOWN:
        for name, setting in settings:
            if not versions.within(release.version, setting.versions):
                continue
            arguments = [*setting.arguments, *with_it.get(name, ())]
            for refusal in data.refusals(release, arguments, setting.environment):
                refused.append(f"{name}: {refusal.message}")
    assert refused == []


@pytest.mark.parametrize("value", ["fp8", "mxfp8", "qkv-o"])
def test_dense_layers_are_quantised_by_the_releases_that_the_matrix_asks(value):
    """The matrix requests quantised dense layers only of releases that quantise them.

    Every release accepts `linear`, but before 0.30 no layer uses it."""
    dense = axes.load("sm121").axes["dense"].values[value]
    (setting,) = [s for s in dense.settings if s.build is None]
    pairs = data.values(setting.arguments)
    for release in KNOWN:
        answer, *others = [a for a in release.answers if data.values(a.arguments) == pairs]
        if release.version == "0.14.0":
            assert answer.at == "argparse"
            continue
        lines = "\n".join(answer.lines)
        rules = dense.expected.must_see + setting.expected.must_see
        shows = all(re.search(rule, lines) for rule in rules)
        takes = versions.within(release.version, setting.versions)
        assert (bool(answer.linear), shows, others) == (takes, takes, []), answer
        assert "lm_head" not in (answer.linear or "")


def test_fp8_kv_cache_is_taken_with_both_attentions():
    for release in KNOWN:
        # A configuration of the profile may quantise the KV cache as well.
        answers = [
            a
            for a in release.answers
            if a.kind in data.DECIDING and "--kv-cache-dtype" in a.arguments
        ]
        accepted = {(a.kv_cache_dtype, a.kind) for a in answers if a.refused is None}
        assert accepted <= {("fp8", "attention")}, release.version
        sinks = release.version != "0.14.0" and versions.within(release.version, ">=0.28")
        backends = {"TRITON_ATTN", *(["FLASHINFER"] if sinks else [])}
        assert {a.attention for a in answers} >= backends, release.version


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.24.0", "0.24.0"),
        ("0.27.9", "0.27.1"),
        ("0.24.0+nv26.7", "0.24.0"),
        ("0.14.0+mxfp4", "0.14.0"),
        ("0.99.0", None),
        ("0.1.dev16581+g0a1b2c3", None),
        ("a1b2c3", None),
        (None, None),
    ],
)
def test_the_recorded_release_for_a_version(version, expected):
    """The recorded release for a version is the release itself, or the one before it.

    Both have the same minor version."""
    known = data.at(KNOWN, version)
    assert (known and known.version) == expected


def test_no_case_starts_a_release_with_a_drafter(tmp_path):
    """A release that was recorded again refused each configuration with a drafter."""
    cases = choices.cases("0.32.0", tmp_path, tmp_path, None)
    started = [case for case in cases if not case["parse_only"]]
    assert any(case["kind"] == "configuration eagle3-short" for case in started)
    assert not any("--speculative-config" in case["arguments"] for case in started)


def test_the_data_are_written_as_they_are_read(tmp_path):
    data.write(KNOWN, tmp_path / "data.jsonl")
    assert (tmp_path / "data.jsonl").read_text("utf-8") == data.FILE.read_text("utf-8")


@pytest.mark.parametrize("version", VERSIONS)
def test_logged_choices_of_a_release_are_recognised(version, tmp_path):
    for number, answer in enumerate(data.at(KNOWN, version).answers):
        if answer.attention is None:
            continue
        log = tmp_path / f"{number}.log"
        # Convert the lines to the format of the release: LEVEL date time [file:line] text.
        lines = [
            line.replace(" [", " 11-22 13:00:00 [", 1).replace("]", ":1]", 1)
            for line in answer.lines
        ]
        log.write_text("".join(f"(EngineCore pid=7) {line}\n" for line in lines), encoding="utf-8")
        path = read_log(log)
        layout = answer.layout if any("KV cache layout" in line for line in lines) else None
        start = f"{version}, {answer.kind} {' '.join(answer.arguments)}: {lines}"
        expected = (answer.attention, answer.experts, layout)
        assert (path.attention, path.moe, path.kv_layout) == expected, start


@pytest.mark.parametrize("version", VERSIONS)
def test_the_parser_of_every_release_can_be_asked(version):
    modules = (IN_ENGINE / "sm121_arguments.py").read_text("utf-8")
    assert f'"{data.at(KNOWN, version).arguments_in}"' in modules


def test_the_page_is_made_of_the_data(tmp_path):
    root = ROOT
    page.write(KNOWN, tmp_path / "choices.md")
    made = (tmp_path / "choices.md").read_text("utf-8")
    assert made == (root / "docs/tables/choices.md").read_text("utf-8"), (
        "python -m tools.choices --page"
    )
