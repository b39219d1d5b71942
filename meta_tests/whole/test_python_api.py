"""The script of docs/python-api.md runs unchanged, without pytest."""

import json
import os
import re
import subprocess
import sys

import pytest

from meta_tests.faults.protocol_faults import vllm_serving
from meta_tests.folders import FAKES, ROOT
from meta_tests.texts import text_file

#: A script that fails if it, or anything that it imports, imports pytest.
WITHOUT_PYTEST = """
import sys
for name in ("pytest", "_pytest", "pytest_benchmark"):
    sys.modules[name] = None
"""


def script() -> str:
    """Return the code block of the page that is marked for this test."""
    page = (ROOT / "docs" / "python-api.md").read_text("utf-8")
    block = r"<!-- run: meta_tests/whole/test_python_api.py.*?```python\n(.*?)```"
    return re.search(block, page, re.S)[1]


def test_the_script_imports_names_that_there_are():
    imports = [line for line in script().splitlines() if line.startswith(("import ", "from "))]
    assert len(imports) > 5
    subprocess.run([sys.executable, "-c", WITHOUT_PYTEST + "\n".join(imports)], check=True)


@pytest.mark.slow("a real vLLM and a cell of its matrix: three minutes")
@pytest.mark.alone
def test_the_levels_run_from_a_plain_script_against_a_url(canary_bf16, tmp_path):
    managed = vllm_serving(canary_bf16, tmp_path)
    try:
        endpoint = managed.start().endpoint
        file = tmp_path / "judge.py"
        file.write_text(WITHOUT_PYTEST + script())
        log = str(managed.launch.log)
        ran = subprocess.run(
            [sys.executable, str(file), endpoint.base_url, endpoint.api_key, log],
            cwd=tmp_path, env={**os.environ, "PYTHONWARNINGS": "error::ResourceWarning"},
            capture_output=True, text=True, timeout=400,
        )  # fmt: skip
    finally:
        managed.stop()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Decision(verdict=<Verdict.PASS" in ran.stdout, ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("PASS"), ran.stdout
    verdict = json.loads((tmp_path / "judged" / "verdict.json").read_text())
    assert verdict["metrics"]["tg32@d0"]["value"] > 1 and not verdict["engine"]["managed"]
    assert verdict["engine"]["path"]["attention"] == "CPU_ATTN"
    assert (tmp_path / "judged" / "matrix" / "FEATURE_MATRIX.md").is_file()
    assert (tmp_path / "judged" / "memory.json").is_file()


def test_a_server_that_does_not_start_for_a_script_leaves_a_bundle(canary_bf16, tmp_path):
    file = tmp_path / "crash.py"
    file.write_text(WITHOUT_PYTEST + text_file("script-with-a-crash.txt"))
    engine = {
        "SM121_META_PYTHON": sys.executable, "SM121_META_SERVER": "fault_server.py",
        "SM121_META_ARGUMENTS": "--no-such-argument",
    }  # fmt: skip
    python = FAKES / "fake_python.py"
    ran = subprocess.run(
        [sys.executable, str(file), str(ROOT), str(python)], cwd=tmp_path,
        env={**os.environ, **engine}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (crash,) = json.loads((tmp_path / "judged" / "verdict.json").read_text())["crashes"]
    assert (tmp_path / "judged" / crash["bundle"] / "bundle.json").is_file(), crash
    assert crash["kind"] in ran.stdout and "crash: " in ran.stderr, ran.stderr
