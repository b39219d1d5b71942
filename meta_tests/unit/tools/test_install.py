"""tools/install.py: uv gets pip's settings, pip is the fallback, and both show progress."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import install

BEST = ["--index-strategy", "unsafe-best-match"]


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        pytest.param("", [], id="pip has no settings"),
        pytest.param(
            "global.index-url='https://a/simple'",
            ["--default-index", "https://a/simple"],
            id="section global",
        ),
        pytest.param(
            "install.index-url='https://b/simple'\nglobal.index-url='https://a/simple'",
            ["--default-index", "https://b/simple"],
            id="section install wins over global",
        ),
        pytest.param(
            ":env:.index-url='https://c/simple'\ninstall.index-url='https://b/simple'",
            ["--default-index", "https://c/simple"],
            id="a variable wins over section install",
        ),
        pytest.param(
            "download.index-url='https://d/simple'\nglobally.no-index='true'",
            [],
            id="sections of other commands do not count",
        ),
        pytest.param(
            ":env:.constraint=''\nglobal.constraint='/etc/c.txt'",
            ["--constraint", "/etc/c.txt"],
            id="an empty value does not count",
        ),
        pytest.param(
            r"global.extra-index-url='\nfile:///one/simple\nhttps://u:p%40@two/simple'",
            ["--index", "file:///one/simple", "--index", "https://u:p%40@two/simple"],
            id="extra indexes on several lines",
        ),
        pytest.param(
            "global.find-links='/wheels https://f/links'",
            ["--find-links", "/wheels", "--find-links", "https://f/links"],
            id="find-links",
        ),
        pytest.param(
            r"global.constraint='/one.txt\n/two.txt'",
            ["--constraint", "/one.txt", "--constraint", "/two.txt"],
            id="two constraints",
        ),
        pytest.param(
            "global.trusted-host='a.example b.example:8080'",
            ["--allow-insecure-host", "a.example", "--allow-insecure-host", "b.example:8080"],
            id="trusted-host",
        ),
        pytest.param(
            'global.index-url="https://a/it\'s=here"',
            ["--default-index", "https://a/it's=here"],
            id="a quote and an equals sign",
        ),
        pytest.param("global.timeout='60'\nglobal.quiet='1'", [], id="settings of no package"),
        *(
            pytest.param(f"global.no-index='{value}'", ["--no-index"], id=f"no-index = {value}")
            for value in ("true", "yes", "1", "On")
        ),
        *(
            pytest.param(f"global.no-index='{value}'", [], id=f"no-index = {value}")
            for value in ("false", "no", "0", "Off")
        ),
    ],
)
def test_pips_settings_become_options_of_uv(listing, expected):
    assert install.uv_options(install.pip_settings(listing)) == [*BEST, *expected]


def test_certificate_proxy_and_timeout_become_variables_of_uv():
    listing = "global.cert='/ca.pem'\n:env:.proxy='http://p:3128'\nglobal.default-timeout='180'"
    assert install.uv_variables(install.pip_settings(listing)) == {
        "SSL_CERT_FILE": "/ca.pem",
        "ALL_PROXY": "http://p:3128",
        "UV_HTTP_TIMEOUT": "180",
    }


def test_pip_lists_its_settings_in_the_form_that_is_read(tmp_path):
    """pip lists its settings in the form that the tool reads.

    The test uses a real pip, with a file of several lines and a variable."""
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nextra-index-url =\n  https://one/simple\n  https://two/simple\n"
        "[install]\nno-index = no\nconstraint = /c.txt\n"
    )
    variables = {name: value for name, value in os.environ.items() if "PIP_" not in name}
    variables |= {"PIP_CONFIG_FILE": str(file), "PIP_FIND_LINKS": "/w1 /w2", "HOME": str(tmp_path)}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env=variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    settings = install.pip_settings(listed.stdout)
    assert settings["extra-index-url"][-2:] == ["https://one/simple", "https://two/simple"]
    assert settings["find-links"] == ["/w1", "/w2"] and settings["constraint"] == ["/c.txt"]
    assert not install.is_on(settings, "no-index")


def test_a_line_is_printed_every_ten_seconds(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(install, "PROGRESS_EVERY_S", 0.3)
    script = "import time\nprint('Downloading torch (180MiB)', flush=True)\ntime.sleep(1.1)"
    assert install.run([sys.executable, "-c", script], tmp_path / "log") == 0
    *progress, last = capsys.readouterr().out.splitlines()
    assert len(progress) >= 2
    assert re.fullmatch(r"   \d+ s: Downloading torch \(180MiB\)", progress[-1])
    assert re.fullmatch(r"   packages: installed in \d+ s", last)


def test_an_installer_that_fails_has_its_status_and_says_nothing_of_success(tmp_path, capsys):
    assert install.run([sys.executable, "-c", "raise SystemExit(7)"], tmp_path / "log") == 7
    assert capsys.readouterr().out == ""


#: Replaces the environment's interpreter: `python -m uv` and `python -m pip` write their arguments
#: to the log of calls. `python -m uv pip install` ends with the status in UV_ENDS.
PYTHON = """#!{python}
import os, sys
words = sys.argv[2:]
with open("{calls}", "a") as calls:
    calls.write(" ".join(words) + "\\n")
if words[:3] == ["pip", "config", "list"]:
    print(os.environ["PIP_LISTS"])
if words[:2] == ["uv", "--version"] or words[:2] == ["pip", "install"] and words[-1] == "uv":
    sys.exit(int(os.environ.get("UV_IS_THERE", "0")))
if words[0] == "uv":
    index = words[words.index("--index") + 1] if "--index" in words else ""
    print("error: no solution found")
    sys.exit(int(os.environ["UV_ENDS"]) if index != os.environ.get("UV_WANTS", "-") else 0)
sys.exit(int(os.environ.get("PIP_ENDS", "0")))
"""
TORCH = "https://torch.example/cpu"


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Return a function that installs with the replaced interpreter, and returns the status and the
    calls."""
    log = tmp_path / "calls"
    python = tmp_path / "python"
    python.write_text(PYTHON.format(python=sys.executable, calls=log))
    python.chmod(0o755)
    monkeypatch.setattr(install.sys, "executable", str(python))

    def installed(listing: str = "", **variables: str) -> tuple[int, list[str]]:
        monkeypatch.setenv("PIP_LISTS", listing)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        status = install.install(TORCH, ["-e", ".[cpu]"], tmp_path / "install.log")
        lines = log.read_text().splitlines()
        return status, [line for line in lines if " install " in line or "uninstall" in line]

    return installed


def test_uv_installs_at_once_and_pip_is_not_needed(calls, capsys):
    status, made = calls("global.find-links='/wheels'", UV_ENDS="0")
    assert status == 0 and len(made) == 1
    assert made[0].startswith("uv pip install --python ") and "--find-links /wheels" in made[0]
    assert TORCH not in made[0] and made[0].endswith(" -e .[cpu]")
    assert "error" not in capsys.readouterr().out


def test_without_settings_of_pip_pytorchs_index_is_used_at_once(calls, capsys):
    status, made = calls("", UV_ENDS="1", UV_WANTS=TORCH)
    assert status == 0 and len(made) == 1 and f"--index {TORCH}" in made[0]
    assert "failed" not in capsys.readouterr().out


def test_an_index_of_pips_without_torch_is_helped_by_pytorchs(calls):
    status, made = calls("global.index-url='https://a/simple'", UV_ENDS="1", UV_WANTS=TORCH)
    assert status == 0 and len(made) == 2
    assert TORCH not in made[0] and f"--index {TORCH}" in made[1]
    for line in made:
        assert "--default-index https://a/simple" in line


@pytest.mark.parametrize("variables", [{"UV_ENDS": "2"}, {"UV_ENDS": "0", "UV_IS_THERE": "1"}])
def test_pip_installs_if_uv_fails(calls, capsys, variables):
    """If uv has no network or cannot be installed, pip installs the packages."""
    status, made = calls("", **variables)
    assert status == 0
    assert made[-2] == f"pip install --progress-bar off --extra-index-url={TORCH} -e .[cpu]"
    assert made[-1] == "pip uninstall --yes torchvision torchaudio torchcodec"
    text = capsys.readouterr().out
    assert "pip installs instead" in text and "installed in" in text and "Traceback" not in text


def test_if_uv_and_pip_fail_both_reasons_are_shown(calls, capsys):
    status, _made = calls("", UV_ENDS="2", PIP_ENDS="9")
    assert status == 9
    text = capsys.readouterr().out
    assert "uv failed (status 2)" in text and "no solution found" in text
    assert "pip failed (status 9)" in text


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """A folder with one wheel, from which alone pip installs. Nothing is cached."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "sm121_tiny-1.0-py3-none-any.whl", "w") as archive:
        info = "sm121_tiny-1.0.dist-info"
        archive.writestr("sm121_tiny.py", "")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: sm121-tiny\nVersion: 1\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(f"[install]\nno-index = yes\nfind-links =\n  {folder}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("UV_NO_CACHE", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return folder


@pytest.mark.parametrize(
    "has_network",
    [pytest.param(True, id="uv finds it"), pytest.param(False, id="uv without a network")],
)
def test_a_real_installer_finds_what_pip_is_set_up_with(
    has_network, wheels, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("uv")
    if not has_network:
        monkeypatch.setattr(install, "uv_options", lambda settings: ["--offline"])
    target = tmp_path / "site"
    words = ["--no-deps", "--target", str(target), "sm121-tiny"]
    assert install.install(TORCH, words, tmp_path / "install.log") == 0
    assert (target / "sm121_tiny.py").is_file()
    assert ("pip installs instead" in capsys.readouterr().out) == (not has_network)
