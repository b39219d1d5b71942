"""A mistake in a data file is one line that names the file and what was expected."""

import re
import tomllib
from pathlib import Path

import pytest
from data_rows import ROWS, from_data, text_file

from sm121.api import cases
from sm121.compilation import probes
from sm121.core import data_file, profile
from sm121.engines import capabilities, preflight, requested
from sm121.evidence import failure, kernel_profile, signatures
from sm121.kernels import serving
from sm121.matrix import axes
from sm121.regression import hypothesis
from sm121.report import references

FIXTURES = Path(__file__).parent.parent / "fixtures"
#: By the kind of a file: its model, and a right file, in which a row makes its mistake.
KINDS = {
    "profile": (profile.Profile, FIXTURES / "profiles" / "cpu-tiny-gpt-oss.toml"),
    "engine": (capabilities.EngineFile, FIXTURES / "engines" / "vllm.toml"),
    "axes": (axes.AxesFile, FIXTURES / "matrix" / "cpu.toml"),
    "hypothesis": (hypothesis.Hypothesis, FIXTURES / "hypotheses" / "example.toml"),
    "preflight": (preflight.PreflightData, "one-rule.toml"),
    "probes": (probes.ProbeData, "one-probe.toml"),
    "api cases": (cases.CaseFile, None),
    "failures": (failure.FailureSet, None),
    "kernel names": (kernel_profile.KernelNames, None),
    "kernels that serve": (serving._ServingFile, None),
    "references": (references.References, None),
    "requests": (requested.RequestRules, None),
    "signatures": (signatures.SignatureSet, None),
}


@from_data
def test_a_mistake_is_one_line(kind, old, new, expected):
    model, right = KINDS[kind]
    text = ""
    if right is not None:
        text = right.read_text("utf-8") if isinstance(right, Path) else text_file(right)
        data_file.parse(text, model, "mine.toml")
    assert (old or "") in text
    wrong = f"{text}\n{new}" if old is None else text.replace(old, new, 1)
    with pytest.raises(data_file.DataFileError) as caught:
        data_file.parse(wrong, model, "mine.toml")
    assert re.fullmatch(f"mine.toml: .*({expected}).*", str(caught.value)), caught.value


@pytest.mark.parametrize("file", sorted(ROWS.glob("*.toml")), ids=lambda file: file.stem)
def test_each_table_of_rows_is_read(file):
    """Rows of a test that is called otherwise since would be run by nothing."""
    module = (ROWS.parent.parent / f"{file.stem}.py").read_text("utf-8")
    names = tomllib.loads(file.read_text("utf-8"))
    assert [name for name in names if not re.search(rf'def {name}\(|"{name}"', module)] == []
