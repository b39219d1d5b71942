"""Install packages into the running interpreter's environment with uv.

uv does not read pip's settings. This script passes pip's indexes, find-links and constraints on to
uv, and prints one line every ten seconds while uv works:

    .venv/bin/python tools/install.py -e '.[cpu]'

It has no dependencies, because it runs in an environment that is still empty. If it fails, the
Makefile falls back to pip.
"""

import ast
import subprocess
import sys
import time
from pathlib import Path

#: uv's option for each of pip's settings.
UV_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
#: Settings of these sections of pip's configuration apply to `pip install`, the last first.
SECTIONS = ("global", "install", ":env:")
PROGRESS_EVERY_S = 10.0


def pip_settings(listing: str) -> dict[str, list[str]]:
    """Return the values of each setting of pip that applies to `pip install`.

    Args:
        listing: The output of `pip config list`, one `section.key='value'` a line.
    """
    settings: dict[str, list[str]] = {}
    for section in SECTIONS:
        for line in listing.splitlines():
            name, separator, value = line.partition("=")
            if separator and name.startswith(f"{section}."):
                key = name.removeprefix(f"{section}.")
                settings[key] = ast.literal_eval(value).split()
    return settings


def uv_options(settings: dict[str, list[str]]) -> list[str]:
    """Return the options that make uv use the packages that pip would use.

    Args:
        settings: What `pip_settings` returned.
    """
    # pip takes the best version of all indexes; uv would stop at the first that has the package.
    options = ["--index-strategy", "unsafe-best-match"]
    if settings.get("no-index", ["false"]) != ["false"]:
        options.append("--no-index")
    for key, option in UV_OPTIONS.items():
        for value in settings.get(key, []):
            options += [option, value]
    return options


def run(command: list[str], log: Path) -> int:
    """Run a command, and print one line every ten seconds until it ends.

    Args:
        command: The program and its arguments.
        log: The file for the program's output. Its end is printed if the program fails.

    Returns:
        The program's exit status.
    """
    started = time.monotonic()
    printed = started
    with log.open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.2)
            if time.monotonic() - printed >= PROGRESS_EVERY_S:
                printed = time.monotonic()
                lines = log.read_text("utf-8", "replace").split("\n")
                latest = next(
                    (line.strip() for line in reversed(lines) if line.strip()), "starting"
                )
                print(f"   {printed - started:.0f} s: {latest}", flush=True)
    lines = log.read_text("utf-8", "replace").splitlines()
    if process.returncode != 0:
        print("\n".join(lines[-20:]), flush=True)
    else:
        print(f"   installed in {time.monotonic() - started:.0f} s", flush=True)
    return process.returncode


def main(arguments: list[str]) -> int:
    """Install what the arguments name, as `uv pip install` takes them."""
    python = [sys.executable, "-m"]
    if subprocess.run([*python, "uv", "--version"], capture_output=True).returncode != 0:
        subprocess.run([*python, "pip", "install", "--quiet", "uv"], check=True)
    listing = subprocess.run(
        [*python, "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    excludes = Path(__file__).with_name("excludes.txt")
    command = [
        *python,
        "uv",
        "pip",
        "install",
        "--python",
        sys.executable,
        "--excludes",
        str(excludes),
    ]
    return run(
        [*command, *uv_options(pip_settings(listing)), *arguments], Path(sys.prefix) / "install.log"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
