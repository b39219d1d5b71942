"""Install packages into the running interpreter's environment: with uv, or with pip if uv fails.

    .venv/bin/python tools/install.py --torch-index https://download.pytorch.org/whl/cpu -e '.[cpu]'

uv does not read pip's settings. This script passes pip's indexes, find-links, constraints,
certificate and proxy on to uv. It prints one line every ten seconds while an installer works. It
has no dependencies, because it runs in an environment that is still empty.
"""

import argparse
import ast
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

Settings = Mapping[str, Sequence[str]]

#: uv's option for each of pip's settings.
UV_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
#: Settings of pip for which uv has a variable, but no option.
UV_VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "client-cert": "SSL_CLIENT_CERT",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
#: pip's settings whose value is a list, separated by white space.
LISTS = ("extra-index-url", "find-links", "constraint", "trusted-host")
#: Sections of pip's configuration that apply to `pip install`; a later one wins.
SECTIONS = ("global", "install", ":env:")
#: Settings that say where packages come from.
SOURCES = ("index-url", "extra-index-url", "find-links", "no-index")
#: pip's words for a switch that is off.
OFF = ("0", "no", "false", "off", "n", "f")
EXCLUDES = Path(__file__).with_name("excludes.txt")
PROGRESS_EVERY_S = 10.0


def pip_settings(listing: str) -> dict[str, list[str]]:
    """Return the values of each setting of pip that applies to `pip install`.

    Args:
        listing: The output of `pip config list`, with one `section.key='value'` per line.
    """
    settings: dict[str, list[str]] = {}
    for section in SECTIONS:
        for line in listing.splitlines():
            name, separator, literal = line.partition("=")
            if not separator or not name.startswith(f"{section}."):
                continue
            key = name.removeprefix(f"{section}.")
            value = ast.literal_eval(literal)
            # pip ignores an empty value, so the value of an earlier section stays.
            if value.strip():
                if key in LISTS:
                    settings[key] = value.split()
                else:
                    settings[key] = [value.strip()]
    return settings


def is_on(settings: Settings, key: str) -> bool:
    """Return whether a switch of pip is on.

    Args:
        settings: The result of `pip_settings`.
        key: The name of the switch, for example ``no-index``.
    """
    return any(value.lower() not in OFF for value in settings.get(key, []))


def uv_options(settings: Settings) -> list[str]:
    """Return the options that make uv use the packages that pip would use.

    Args:
        settings: The result of `pip_settings`.
    """
    # pip takes the best version of all indexes; uv would stop at the first that has the package.
    options = ["--index-strategy", "unsafe-best-match"]
    if is_on(settings, "no-index"):
        options.append("--no-index")
    for key, option in UV_OPTIONS.items():
        for value in settings.get(key, []):
            options += [option, value]
    return options


def uv_variables(settings: Settings) -> dict[str, str]:
    """Return the variables that make uv reach the network as pip does.

    Args:
        settings: The result of `pip_settings`.
    """
    return {variable: settings[key][0] for key, variable in UV_VARIABLES.items() if key in settings}


def run(
    command: Sequence[str],
    log: Path,
    variables: Mapping[str, str] | None = None,
    what: str = "packages",
) -> int:
    """Run a command, and print one line every ten seconds until it ends.

    Args:
        command: The program and its arguments.
        log: The file for the program's output.
        variables: Environment variables of the program, in addition to those of this process.
        what: What it installs, for the last line.

    Returns:
        The program's exit status.
    """
    started = time.monotonic()
    printed = started
    environment = {**os.environ, **(variables or {})}
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        while process.poll() is None:
            time.sleep(0.1)
            now = time.monotonic()
            if now - printed >= PROGRESS_EVERY_S:
                printed = now
                latest = last_lines(log, 1) or ["starting"]
                print(f"   {now - started:.0f} s: {latest[0]}", flush=True)
    if process.returncode == 0:
        print(f"   {what}: installed in {time.monotonic() - started:.0f} s", flush=True)
    return process.returncode


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a file that are not empty.

    Args:
        log: The file.
        count: The maximum number of lines.
    """
    text = log.read_text("utf-8", "replace")
    return [line.strip() for line in text.splitlines() if line.strip()][-count:]


def has_uv(log: Path) -> bool:
    """Return whether the environment has uv. If it does not, first try to install uv with pip.

    Args:
        log: The file for pip's output.
    """
    python = [sys.executable, "-m"]
    if subprocess.run([*python, "uv", "--version"], capture_output=True).returncode == 0:
        return True
    return run([*python, "pip", "install", "--quiet", "uv"], log, what="uv") == 0


def install(torch_index: str | None, arguments: Sequence[str], log: Path) -> int:
    """Install with uv; with pip if that fails.

    Args:
        torch_index: The index of PyTorch's CPU builds, which are not on PyPI. It is used at once
            if pip has no index of its own, else only if pip's indexes do not suffice.
        arguments: What to install, as both `uv pip install` and `pip install` take it.
        log: The file for the installers' output. Its end is printed after each failure.

    Returns:
        The exit status of the last installer.
    """
    python = [sys.executable, "-m"]
    listed = subprocess.run([*python, "pip", "config", "list"], capture_output=True, text=True)
    settings = pip_settings(listed.stdout)
    indexes = [torch_index] if torch_index and not is_on(settings, "no-index") else []
    has_own_sources = any(key in settings for key in SOURCES)

    attempts: list[list[str]] = []
    if has_uv(log):
        uv = [*python, "uv", "pip", "install", "--python", sys.executable]
        uv += ["--excludes", str(EXCLUDES), *uv_options(settings)]
        if has_own_sources or not indexes:
            attempts.append([*uv, *arguments])
        attempts += [[*uv, "--index", index, *arguments] for index in indexes]
    else:
        print("   uv: expected in pip's indexes, not found", flush=True)
    for command in attempts:
        status = run(command, log, uv_variables(settings))
        if status == 0:
            return status
        print(f"   uv failed (status {status}):", *last_lines(log, 8), sep="\n     ", flush=True)

    print("   pip installs instead, which takes minutes", flush=True)
    pip = [*python, "pip", "install", "--progress-bar", "off"]
    pip += [f"--extra-index-url={index}" for index in indexes]
    status = run([*pip, *arguments], log)
    if status != 0:
        print(f"   pip failed (status {status}):", *last_lines(log, 20), sep="\n     ", flush=True)
        return status
    excluded = []
    for name in last_lines(EXCLUDES, 99):
        if not name.startswith("#"):
            excluded.append(name)
    subprocess.run([*python, "pip", "uninstall", "--yes", *excluded], capture_output=True)
    return status


def main(words: Sequence[str]) -> int:
    """Install the packages that the command line names.

    Args:
        words: The words of the command line. Except for ``--torch-index``, they are passed on.

    Returns:
        The exit status of the installer.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--torch-index", metavar="URL", help="the index of PyTorch's CPU builds")
    options, arguments = parser.parse_known_args(words)
    return install(options.torch_index, arguments, Path(sys.prefix) / "install.log")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
