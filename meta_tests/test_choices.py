"""What releases were seen to refuse and choose on a GB10 holds the profile, the matrix, the
preflight and the signatures (``fixtures/choices``, made by ``python -m tools.choices``)."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from data_rows import from_data

from sm121.core import builds, versions
from sm121.core import profile as profiles
from sm121.core.configuration import ServerConfiguration
from sm121.core.engine_settings import Needs
from sm121.core.profile import Profile
from sm121.engines import choices
from sm121.engines.choices import Choices, Release
from sm121.engines.preflight import Preflight, PreflightFinding
from sm121.evidence.kernel_path import read_log
from sm121.matrix import axes
from sm121.session.session import Session
from tools.choices import page

FLASHINFER = ["--attention-backend", "FLASHINFER"]
IN_ENGINE = Path(choices.__file__).parent / "in_engine"


def never_asked(release: Release, arguments: Sequence[str]) -> list[str]:
    """What of a start the release was not asked for when the data were made."""
    given = choices.as_pairs(arguments)
    asked = [(answer.kind, choices.as_pairs(answer.arguments)) for answer in release.answers]
    kept = {name for names in choices.DECIDING.values() for name in names}
    options = {name for kind, pairs in asked if kind == "option" for name in pairs}
    unknown = [name for name in given if name not in options | kept]
    for kind in choices.DECIDING:
        own = choices.deciding(kind, given)
        if own and own not in [pairs for other, pairs in asked if other == kind]:
            unknown.append(" ".join(own))
    return unknown


def known() -> Choices:
    return choices.load("vllm", "sm121")


def release(version: str) -> Release:
    return known().at(version)


def asked_for_in_vain(profile: Profile) -> list[str]:
    """What configurations of a profile ask of releases that refuse it, or were never asked."""
    found = []
    bases = [build.release for build in builds.shipped()]  # there for their parser alone
    for item in known().releases:
        if item.version in bases:
            continue
        for name, configuration in profile.configurations.items():
            own = configuration.at(item.version)
            if own is None:
                continue
            arguments = (*profile.engine.arguments, *own.arguments)
            environment = {**profile.engine.environment, **own.environment}
            refused = choices.refusals(item, arguments, environment)
            found += [f"{name}: {refusal.message}" for refusal in refused]
            found += [
                f"{name}: vLLM {item.version} was never asked for {option}: "
                "run `python -m tools.choices`"
                for option in never_asked(item, arguments)
            ]
    return found


def test_the_profile_asks_no_release_for_what_it_refuses():
    assert asked_for_in_vain(profiles.load("sm121-gpt-oss-120b")) == []


@pytest.mark.parametrize(
    "build", [row for row in builds.shipped() if row.engine == "vllm"], ids=lambda row: row.name
)
def test_the_profile_asks_no_build_for_what_its_parser_refuses(build):
    identity = f"{build.release}+{build.name}"
    profile, base = profiles.load("sm121-gpt-oss-120b"), release(identity)
    asked = [own for c in profile.configurations.values() if (own := c.at(identity))]
    assert asked
    for own in asked:
        arguments = (*profile.engine.arguments, *own.arguments)
        assert choices.refusals(base, arguments, own.environment) == []


@pytest.mark.parametrize(
    "name", [name for name in profiles.shipped() if profiles.load(name).arch == "sm121"]
)
def test_no_profile_of_a_gb10_asks_for_what_is_refused(name):
    """The options of the canary's size (blocks of the cache, graphs' sizes) were never asked."""
    assert [line for line in asked_for_in_vain(profiles.load(name)) if "never" not in line] == []


@pytest.mark.parametrize("version", [item.version for item in known().releases])
def test_what_a_release_chooses_is_what_the_profile_expects(version):
    """A healthy machine passes the kernel path: with each configuration, and with no arguments."""
    profile = profiles.load("sm121-gpt-oss-120b")
    seen = 0
    for answer in release(version).answers:
        name = "stock" if answer.kind == "nothing" else answer.kind.removeprefix("configuration ")
        configuration = profile.configurations.get(name)
        own = None if configuration is None else configuration.at(version)
        if own is None:
            continue
        seen += 1
        asked = f"vLLM {version}, {answer.kind}, {answer.machine}"
        assert answer.refused is None, asked
        for accepted, value in (
            (own.path.attention, answer.attention),
            (own.path.moe, answer.experts),
            (own.path.kv_layout, answer.layout),
        ):
            assert accepted is None or value in accepted, (asked, value, accepted)
    assert seen > sum(each.at(version) is not None for each in profile.configurations.values())


@from_data
def test_a_planted_configuration_is_seen(arguments, environment, words):
    profile = profiles.load("sm121-gpt-oss-120b")
    planted = profile.configurations["stock"].model_copy(
        update={"arguments": arguments, "environment": environment}
    )
    bad = profile.model_copy(update={"configurations": {"planted": planted}})
    assert any(words in line for line in asked_for_in_vain(bad))


def test_the_matrix_asks_no_release_for_what_it_refuses():
    refused = []
    for item in known().releases:
        for name, axis in axes.load("sm121").axes.items():
            for value, own in axis.values.items():
                for setting in own.settings:
                    if setting.engine != "vllm" or setting.build is not None:
                        continue
                    if not versions.within(item.version, setting.versions):
                        continue
                    # CUTLASS is not asked for without the activations that it needs.
                    arguments = [*setting.arguments]
                    if (name, value) == ("moe", "cutlass"):
                        arguments += ["--quantization-config.moe.activation", "mxfp8"]
                    for refusal in choices.refusals(item, arguments, setting.environment):
                        refused.append(f"{name}={value}: {refusal.message}")
    assert refused == []


@pytest.mark.parametrize("value", ["fp8", "mxfp8", "qkv-o"])
def test_dense_layers_are_quantised_by_the_releases_that_the_matrix_asks(value):
    """`linear` is taken by every release; before 0.30 no layer has it."""
    own = axes.load("sm121").axes["dense"].values[value]
    (setting,) = [s for s in own.settings if s.build is None]
    wanted = choices.as_pairs(setting.arguments)
    everything = known()
    for item in everything.releases:
        answers = [a for a in item.answers if choices.as_pairs(a.arguments) == wanted]
        if item.version == "0.14.0":
            assert answers[0].at == "argparse"
            continue
        (answer,) = answers
        lines = "\n".join(everything.lines[place] for place in answer.lines)
        seen = all(re.search(p, lines) for p in own.expected.must_see + setting.expected.must_see)
        takes = versions.within(item.version, setting.versions)
        assert (bool(answer.linear), seen) == (takes, takes), (item.version, answer)
        assert "lm_head" not in (answer.linear or "")


def test_fp8_kv_cache_is_taken_with_both_attentions():
    for item in known().releases:
        for answer in item.answers:
            if "--kv-cache-dtype" in answer.arguments and answer.refused is None:
                assert (answer.kv_cache_dtype, answer.kind) == ("fp8", "attention")
        asked = [a for a in item.answers if "--kv-cache-dtype" in a.arguments]
        taken = {a.attention for a in asked}
        sinks = item.version != "0.14.0" and versions.within(item.version, ">=0.28")
        assert taken >= {"TRITON_ATTN", *(["FLASHINFER"] if sinks else [])}, item.version


def test_dotted_options_are_keys_of_their_json():
    dotted = ["--quantization-config.linear", "mxfp8", "--quantization_config.moe.activation=mxfp8"]
    asked = ["--quantization-config", '{"linear":"mxfp8","moe":{"activation":"mxfp8"}}']
    assert choices.as_pairs(dotted) == choices.as_pairs(asked)
    assert choices.as_pairs(["--a", "--b=1.5"]) == {"--a": None, "--b": "1.5"}


@pytest.mark.parametrize("version", [item.version for item in known().releases])
def test_what_a_release_logs_for_its_choice_is_recognised(version, tmp_path):
    everything = known()
    for number, answer in enumerate(release(version).answers):
        if answer.attention is None:
            continue
        log = tmp_path / f"{number}.log"
        lines = [everything.lines[place] for place in answer.lines]
        # The release's own form: LEVEL date time [file:line] text.
        lines = [
            line.replace(" [", " 11-22 13:00:00 [", 1).replace("]", ":1]", 1) for line in lines
        ]
        log.write_text("".join(f"(EngineCore pid=7) {line}\n" for line in lines), encoding="utf-8")
        path = read_log(log)
        said = any("KV cache layout" in line for line in lines)
        asked = f"{version}, {answer.kind} {' '.join(answer.arguments)}: {lines}"
        assert (path.attention, path.moe) == (answer.attention, answer.experts), asked
        assert path.kv_layout == (answer.layout if said else None), asked


@pytest.mark.parametrize("version", [item.version for item in known().releases])
def test_the_parser_of_every_release_can_be_asked(version):
    places = (IN_ENGINE / "sm121_arguments.py").read_text("utf-8")
    assert f'"{release(version).arguments_in}"' in places


def test_the_page_is_made_of_the_data(tmp_path):
    root = Path(__file__).parents[1]
    page.write(root / "fixtures/choices/vllm-sm121.toml", tmp_path / "choices.md")
    made = (tmp_path / "choices.md").read_text("utf-8")
    assert made == (root / "docs/tables/choices.md").read_text("utf-8"), (
        "python -m tools.choices --page"
    )


def found(version: str | None, arguments: list[str], arch: str = "sm121") -> list[PreflightFinding]:
    findings = Preflight(
        arch, arguments, {}, needs=Needs(), directory=Path(), engine="vllm", version=version
    ).findings()
    return [finding for finding in findings if finding.check == "release_refuses"]


@from_data
def test_what_is_said_of_a_start(version, arguments, arch, severity, message, remedy):
    """A start that the release refuses is not begun; of what is taken, or not known, nothing."""
    findings = found(version, [*arguments], arch or "sm121")
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    for finding in findings:
        assert all(part in finding.message for part in message or ()), finding.message
        assert (remedy or "") in (finding.remedy or "")


def test_a_run_says_it_before_it_starts_a_server():
    configuration = ServerConfiguration(
        *("cutlass", "vllm", "python3", "m", "m"), arguments=tuple(FLASHINFER)
    )
    said: list[str] = []
    run = SimpleNamespace(
        arch="sm121",
        profile=SimpleNamespace(
            under_test="cutlass",
            baseline="cutlass",
            engine=SimpleNamespace(needs=Needs(), cold_ready_within_s=SimpleNamespace(value=2700)),
        ),
        node_facts={},
        managed_configuration=lambda _: configuration,
        engine_environment=lambda _: {},
        directory=Path(),
        file=SimpleNamespace(engine=SimpleNamespace(identity="0.24.0")),
        remark=lambda line, **_: said.append(line),
        aborted=None,
        distrusted=None,
        attached=None,
    )
    run.findings = Session.findings.func(run)  # type: ignore[attr-defined]
    why = Session.obstacle(run)  # type: ignore[arg-type]
    assert "no server is started: vLLM 0.24.0 refuses --attention-backend FLASHINFER" in why
    assert "it takes --attention-backend TRITON_ATTN" in why
    assert "\n" not in why
    assert any("error: vLLM 0.24.0 refuses" in line for line in said)
