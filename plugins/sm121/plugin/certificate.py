"""What may be given to a run, as far as its certificate and its fingerprint go.

``fixtures/options.toml`` says of each option of the suite what it does to what is measured, and
``fixtures/certificate.toml`` which of pytest's options, settings, variables and plugins change
nothing. What neither of them names is in doubt, and ``--certify`` refuses it.
"""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.config import builtin_plugins

from sm121.checkpoint.identity import is_of_shape
from sm121.core import architecture, data_file, own_tests
from sm121.core.arguments import Argument, Effect
from sm121.core.data_file import DataTable
from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.evidence import environment
from sm121.evidence.signatures import load_signatures
from sm121.matrix import covering
from sm121.plugin import workers
from sm121.session import certification, fingerprinting
from sm121.session.settings import Settings
from sm121.session.target import Target

_OWN_CONFTEST = ["sm121.plugin"]


class _Pytest(DataTable):
    harmless: frozenset[str]
    selects: frozenset[str]
    judges: tuple[str, ...]
    ini: frozenset[str]
    override_ini: frozenset[str]
    variables: frozenset[str]


class _Plugins(DataTable):
    harmless: frozenset[str]
    required: tuple[str, ...]
    may_be_left_out: frozenset[str]


class _Engine(DataTable):
    prefixes: tuple[str, ...]
    harmless: frozenset[str]


class _CertificateFile(DataTable):
    pytest: _Pytest
    plugins: _Plugins
    engine: _Engine


@dataclass(frozen=True)
class Given:
    """An option that was given: on the command line, in a variable or in pytest.ini."""

    name: str
    value: str
    effect: Effect


@functools.cache
def _data() -> _CertificateFile:
    return data_file.load("certificate.toml", _CertificateFile)


def given(config: pytest.Config, own: Mapping[str, Argument]) -> list[Given]:
    """The options whose value is none of their defaults.

    Args:
        own: the suite's options, by the name under which pytest keeps each.
    """
    actions: dict[str, list[object]] = {}
    names: dict[str, str] = {}
    for action in config._parser.optparser._actions:
        actions.setdefault(action.dest, []).append(action.default)
        names.setdefault(action.dest, (action.option_strings or ["paths or node ids"])[-1])
    found = []
    ours = [_own_paths(), *own_tests.words(config.invocation_params.dir)]
    for dest, value in sorted(vars(config.option).items()):
        defaults = actions.get(dest, [None])
        if dest == "benchmark_disable" and workers.is_parallel(config):
            continue  # the suite's own doing
        if value in ([], None, "") or any(_same(value, default) for default in defaults):
            continue
        for part in _parts(dest, value):
            if part in ours:
                continue  # as `sm121 run` says it
            effect = _effect(dest, part, own)
            found.append(Given(names.get(dest, dest), str(part), effect))
    return found


def _own_paths() -> list[str]:
    return [str(own_tests.folder() / "tests")]


def _same(value: object, default: object) -> bool:
    """Whether a value is that default; argparse may have converted the text of one."""
    return (value == default and type(value) is type(default)) or str(value) == str(default)


def _parts(dest: str, value: object) -> Sequence[object]:
    return value if isinstance(value, list) and dest in ("plugins", "override_ini") else [value]


def _effect(dest: str, value: object, own: Mapping[str, Argument]) -> Effect:
    allowed = _data().pytest
    if dest in own:
        return own[dest].effect
    if dest in allowed.selects:
        return "named" if dest == "markexpr" else "selects"
    if dest == "plugins":
        return "harmless" if _may_be_named(str(value)) else "measures"
    known = dest in allowed.harmless or (dest == "override_ini" and value in allowed.override_ini)
    return "harmless" if known else "measures"


def _may_be_named(text: str) -> bool:
    """Whether ``-p TEXT`` changes nothing."""
    name, data = text.removeprefix("no:"), _data().plugins
    if not text.startswith("no:"):
        return name.partition(".")[0] in data.harmless
    if name in data.may_be_left_out:
        return True
    needed = name in builtin_plugins or name in data.required
    return not needed and not name.startswith(("sm121", "pytest_benchmark", "pytest_timeout"))


def refuse_options(options: Sequence[Given]) -> None:
    """Refuse the options with which a certificate would be of something else.

    Raises:
        UsageError: one was given that is not known to be harmless.
    """
    wrong = [
        each
        for each in options
        if each.effect in ("told", "selects", "measures")
        or (each.name == "-m" and each.value.strip() not in architecture.NAMES)
    ]
    if wrong:
        names = dict.fromkeys(f"{each.name} {each.value}"[:80] for each in wrong)
        raise UsageError(
            f"--certify with {', '.join(names)}: expected a run as the profile "
            "says; leave these out, or put what they say into a profile of your own (--profile)"
        )


def refuse(config: pytest.Config, settings: Settings, target: Target) -> None:
    """Refuse what would make the run with ``--certify`` another one than the suite's own.

    Raises:
        UsageError: the settings, the plugins or the values of options are others.
    """
    wrong = [
        *_wrong_values(config, settings, target),
        *_wrong_settings(config),
        *_wrong_plugins(config),
        *_wrong_checkout(config.rootpath),
    ]
    if wrong:
        raise UsageError(f"--certify: {'; '.join(wrong)}")


def _wrong_values(config: pytest.Config, settings: Settings, target: Target) -> list[str]:
    wrong = []
    expression = (config.getoption("markexpr", "") or "").strip()
    if expression not in ("", target.arch):
        wrong.append(f"-m {expression!r}: expected none, or the target, {target.arch}")
    own = target.profile
    if own is not None:
        wrong += _wrong_strength(config.getoption("--matrix"), own)
        wrong += _wrong_model(settings, own)
        wrong += _wrong_configuration(settings.configuration, own)
        if settings.base_url is None:
            wrong += _wrong_variables(own)
    return wrong


def _wrong_configuration(name: str | None, own: Profile) -> list[str]:
    """A configuration that is asked another question than the profile's, or that is there to
    compare with."""
    if name is None or (name in own.fastest and own.question is None):
        return []
    return [
        f"--configuration {name}: expected none, so that the profile's own question is asked, or a "
        f"profile of your own with `under_test = {name!r}` (--profile)"
    ]


def _wrong_variables(own: Profile) -> list[str]:
    """Variables by which this shell tells the engine what the profile does not."""
    allowed = _data().engine
    layers = [set(each.environment) for each in own.configurations.values()]
    known = {*own.engine.environment, *set.intersection(*layers)}
    known |= {*allowed.harmless, *fingerprinting.places()}
    of_images = load_signatures(own.engine.name).is_harmless_env
    return [
        f"the variable {name}, which the engine would see: expected it in the profile's "
        "engine.environment, or not at all"
        for name in sorted(os.environ)
        if name.startswith(allowed.prefixes) and name not in known and not of_images(name)
    ]


def _wrong_strength(asked: str | None, own: Profile) -> list[str]:
    if asked is None or own.matrix is None:
        return []
    strength = covering.parse_strength(asked)
    if strength == "full" or (isinstance(strength, int) and strength >= own.matrix.strength):
        return []
    return [f"--matrix {asked}: expected at least the profile's, {own.matrix.strength}"]


def _wrong_model(settings: Settings, own: Profile) -> list[str]:
    """Another model than the profile's, as far as names and shapes tell; the fingerprint has its
    digest."""
    if settings.base_url is not None and settings.served_name not in (None, own.model.served_name):
        return [
            f"--served-model-name {settings.served_name}: expected the profile's name, "
            f"{own.model.served_name}, of the attached server"
        ]
    if settings.model in (None, own.model.id) or is_of_shape(settings.model, own.model.id):
        return []
    return [
        f"--model {settings.model}: expected the profile's, {own.model.id}, or a folder whose "
        "config.json shows its shape; else say it in a profile of your own (--profile)"
    ]


def _wrong_settings(config: pytest.Config) -> list[str]:
    """Settings that change which tests there are, or how they run."""
    allowed = _data().pytest
    wrong = [
        f"{key} in {config.inipath}: expected a pytest.ini as the suite's own"
        for key in sorted(_ini(config))
        if key not in allowed.ini
    ]
    paths = [str(path) for path in config.getini("testpaths")]
    from_testpaths = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if config.args != _own_paths() and not (from_testpaths and paths == ["tests"]):
        seen = ", ".join(map(str, config.args))
        wrong.append(f"expected the tests of testpaths = tests, and no paths; seen: {seen}")
    strange = [
        name
        for name in sorted(os.environ)
        if name.startswith("PYTEST_") and name not in allowed.variables
    ]
    return [*wrong, *(f"the variable {name}: expected none of pytest's" for name in strange)]


def _wrong_checkout(root: Path) -> list[str]:
    """Other tests than those that belong to the package in use, or changed ones."""
    own = own_tests.folder()
    if root.resolve() != own:
        return [f"the tests of {root}: expected those of {own}, whose package runs: sm121 run"]
    changed = environment.changed_files(root, _data().pytest.judges)
    than = "the commit: commit it, or take it back"
    if changed is None:
        changed = certification.foreign_tests(root)
        than = "the file that ships with the suite (git knows no commit of it here)"
    return [f"{', '.join(changed[:5])} differs from {than}"] if changed else []


def _ini(config: pytest.Config) -> Mapping[str, object]:
    """What pytest.ini says; pytest has deprecated the name that it had before."""
    known: Mapping[str, object] | None = getattr(config, "_inicfg", None)
    return config.inicfg if known is None else known


def _wrong_plugins(config: pytest.Config) -> list[str]:
    """Plugins that may change tests or results, and those that are not there."""
    manager, data = config.pluginmanager, _data().plugins
    wrong = [
        f"the plugin {name} is not loaded" for name in data.required if not manager.has_plugin(name)
    ]
    for name, plugin in manager.list_name_plugin():
        if plugin is None:
            continue
        # A plugin is a module, an object, or (pytest 9.1's legacypath) a class.
        own = plugin if isinstance(plugin, type) else type(plugin)
        module = plugin.__name__ if isinstance(plugin, ModuleType) else own.__module__
        if isinstance(plugin, ModuleType) and name.endswith("conftest.py"):
            wrong += _wrong_conftest(config, name, plugin)
        elif not _is_harmless(module.partition(".")[0]):
            wrong.append(
                f"the plugin {name} may change tests or their results: leave it out with "
                f"-p no:{name}"
            )
    return wrong


def _is_harmless(package: str) -> bool:
    """Whether a plugin's package is known, and is that one: a file may have any name."""
    if package in ("_pytest", "pytest", "sm121"):
        return True
    file = getattr(sys.modules.get(package), "__file__", None)
    if package not in _data().plugins.harmless or file is None:
        return False
    names = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    folders = {Path(name) for name in {*names, *site.getsitepackages(), site.getusersitepackages()}}
    # An environment over another one, as in images: a .pth file has the other one's folder.
    folders |= {
        Path(line.strip())
        for folder in tuple(folders)
        for file_of_paths in folder.glob("*.pth")
        for line in file_of_paths.read_text("utf-8", "replace").splitlines()
        if line.strip().endswith(("site-packages", "dist-packages"))
    }
    return any(Path(file).resolve().is_relative_to(folder.resolve()) for folder in folders)


def _wrong_conftest(config: pytest.Config, file: str, module: ModuleType) -> list[str]:
    defined = [name for name in vars(module) if not name.startswith(("__", "@"))]
    own = file == str(config.rootpath / "conftest.py")
    if own and defined == ["pytest_plugins"] and module.pytest_plugins == _OWN_CONFTEST:
        return []
    return [
        f"{file} may change tests or their results: expected the suite's own, and no other (pytest "
        "also loads what lies beside a file that an option names: write --profile=PATH)"
    ]


def forget_meta_tests(config: pytest.Config) -> None:
    """Unload the conftest of the suite's own tests, which is no part of a run of the levels.

    pytest loads it when an option names a file beside it, as ``--profile meta_tests/data/X.toml``.
    """
    manager = config.pluginmanager
    plugin = manager.get_plugin(str(config.rootpath / "meta_tests" / "conftest.py"))
    if plugin is not None:
        manager.unregister(plugin)
