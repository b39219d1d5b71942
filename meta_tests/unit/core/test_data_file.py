"""A mistake in a data file gives one line. Profiles and signatures have their own test modules."""

import pytest
from pydantic import Field

from meta_tests.faults.data_mistakes import FIXTURES, assert_refused, with_mistake
from meta_tests.texts import text_file
from sm121.api.cases import CaseFile
from sm121.compilation.probes import ProbeData
from sm121.core import data_file
from sm121.engines.capabilities import EngineFile
from sm121.engines.preflight import PreflightData
from sm121.engines.request_rules import RequestRules
from sm121.evidence.kernel_names import KernelNames
from sm121.kernels.serving import _ServingFile
from sm121.matrix.axes import AxesFile
from sm121.regression.hypothesis import Hypothesis
from sm121.report.references import References


def shipped(folder: str, name: str) -> str:
    return (FIXTURES / folder / name).read_text("utf-8")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("min_tokens = { can = true", "min_tokens = { cann = true", "cann"),
        ("seed = {", "sead = {", "sead"),
        ("echo = { can = true", "echo = { can = false", "expected a reason"),
        ('versions = ">=0.19"', 'versions = "new"', "expected versions"),
        ("[detection]", "[detektion]", "detektion"),
        pytest.param(
            None,
            (
                "[[bugs]]\n"
                'checks = ["*"]\n'
                'says = "a text"\n'
                'versions = ""\n'
                'build = "mxpf4"\n'
                'severity = "blocker"\n'
                'what = "a bug"\n'
                'source = "a test"\n'
            ),
            r"build: expected a build of builds.toml \(mxfp4, .*\), got 'mxpf4'",
            id="a bug of no such build",
        ),
    ],
)
def test_a_mistake_in_an_engine_is_one_line(old, new, expected):
    assert_refused(
        EngineFile, with_mistake(EngineFile, shipped("engines", "vllm.toml"), old, new), expected
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        pytest.param(
            None,
            '[axes.a]\ntitle = "a"\nbaseline = "x"\nvalues = {}',
            "baseline|at least 2",
            id="a baseline without values",
        ),
        pytest.param(
            None,
            "[[incompatible]]\nwhen = { colour = 'red' }\nreason = 'why'\nsource = 'the test'",
            "expected an axis .* got 'colour'",
            id="a rule on no such axis",
        ),
        pytest.param(
            None,
            "[[incompatible]]\nwhen = { dtype = 'int4' }\nreason = 'why'\nsource = 'the test'",
            "dtype: expected one of float32, bfloat16; got 'int4'",
            id="a rule on no such value",
        ),
        pytest.param(
            None,
            "[named.X]\nvalues = { graphs = 'none' }\nsource = 'the test'",
            "graphs: expected one of",
            id="a name for no such value",
        ),
        pytest.param(
            None,
            "[[incompatible]]\nwhen = { dtype = 'float32' }\nreason = 'why'\nsource = 'the test'",
            "the baseline itself is ruled out",
            id="a rule on the baseline",
        ),
        pytest.param(
            None,
            "[axes.graphs.values.eager.expected]\npath = { colour = 'red' }",
            "expected TOML",
            id="a table given twice",
        ),
        pytest.param(
            "[axes.dtype]\n", "colour = 1\n\n[axes.dtype]\n", "unknown key", id="an unknown key"
        ),
        pytest.param(
            None,
            (
                "[axes.x]\n"
                "title = 'x'\n"
                "baseline = 'y'\n"
                "[axes.x.values]\n"
                "z = { not_applicable = 'no' }\n"
                "y = { settings = [{ engine = 'vllm', build = 'mine', source = 'the test' }] }"
            ),
            r"build: expected a build of builds.toml \(mxfp4, .*\), got 'mine'",
            id="a setting of no such build",
        ),
    ],
)
def test_a_mistake_in_the_axes_is_one_line(old, new, expected):
    assert_refused(
        AxesFile, with_mistake(AxesFile, shipped("matrix", "cpu.toml"), old, new), expected
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("change_at_least = 0.10", "change_at_lest = 0.10", "change_at_lest"),
        pytest.param(
            "change_at_least = 0.10", "", "expected exactly one of change_at_least", id="no limit"
        ),
        pytest.param(
            "no_crash = true",
            'no_crash = true\nlevel = "smoke"',
            "got level, no_crash",
            id="two kinds in one criterion",
        ),
        ('phase = "P4"', 'phase = "P9"', "phase"),
    ],
)
def test_a_mistake_in_a_hypothesis_is_one_line(old, new, expected):
    assert_refused(
        Hypothesis,
        with_mistake(Hypothesis, shipped("hypotheses", "example.toml"), old, new),
        expected,
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('severity = "error"', 'severity = "fatal"', "severity"),
        ("arguments = '--x'", "", "expected arguments, environment or beside, got none"),
        ("arguments = '--x'", "arguments = '('", "regular expression"),
        ('arch = ["sm121"]', 'arch = ["sm999"]', "sm999"),
        pytest.param('message = "m"', 'message = "m"\ncolour = 1', "colour", id="an unknown key"),
        ("[[rule]]", "[[rule", "expected TOML"),
    ],
)
def test_a_mistake_in_a_preflight_rule_is_one_line(old, new, expected):
    assert_refused(
        PreflightData, with_mistake(PreflightData, text_file("one-rule.toml"), old, new), expected
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"QMMA"', '"QMMA("', "key.*must_see.*expected a regular expression"),
        ("121a =", '"12.1b" =', "key.*outcomes.*12.1b"),
        ('"hardware"', '"perhaps"', "key.*outcomes.121a"),
        ("must_see", "must_sea", "key.*must_sea: unknown key"),
        ('tier = "probes"', 'tier = "slow"', "key.*tier"),
        ('"not supported"', '"("', "key.*refusal"),
    ],
)
def test_a_mistake_in_a_probe_is_one_line(old, new, expected):
    assert_refused(
        ProbeData, with_mistake(ProbeData, text_file("one-probe.toml"), old, new), expected
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "answer_within_s", id="empty"),
        pytest.param(
            'answer_within_s = 1\nplain = {}\n[[case]]\nid = "a"\nteir = "x"',
            "teir",
            id="an unknown key",
        ),
        pytest.param(
            (
                "answer_within_s = 1\n"
                "plain = {}\n"
                "[[case]]\n"
                'id = "a"\n'
                'tier = "implied"\n'
                'expect = "either"\n'
                'path = "/"\n'
                'why = "why"\n'
                "[[case]]\n"
                'id = "a"\n'
                'tier = "implied"\n'
                'expect = "either"\n'
                'path = "/"\n'
                'why = "why"\n'
            ),
            "a given twice",
            id="one id twice",
        ),
    ],
)
def test_a_mistake_in_the_cases_of_the_api_is_one_line(text, expected):
    assert_refused(CaseFile, text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            '[[name]]\nid = "a"\npart = "colour"\nregex = "x"\nsource = "me and you"',
            "part",
            id="no such part",
        ),
        pytest.param(
            '[[name]]\nid = "a"\npart = "moe"\nregex = "("\nsource = "me and you"',
            "regular expr",
            id="no regular expression",
        ),
        pytest.param("", "name", id="empty"),
    ],
)
def test_a_mistake_in_the_names_of_kernels_is_one_line(text, expected):
    assert_refused(KernelNames, text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            (
                "[component]\n"
                "[[engine.vllm]]\n"
                'operations = ["route"]\n'
                'source = "here"\n'
                'provider = "nobody"\n'
            ),
            "provider: expected one of torch",
            id="no such provider",
        ),
        pytest.param(
            (
                "[component]\n"
                "[[engine.vllm]]\n"
                'operations = ["route"]\n'
                'source = "here"\n'
                'provider = "vllm"\n'
                'nothing = "why"\n'
            ),
            "expected one of provider, nothing, unjudged",
            id="a provider, and nothing",
        ),
        pytest.param(
            '[component]\n[[engine.vllm]]\noperations = ["route"]\nsource = "here"\n\n',
            "expected one of provider, nothing, unjudged",
            id="neither",
        ),
    ],
)
def test_a_mistake_in_the_kernels_that_serve_is_one_line(text, expected):
    assert_refused(_ServingFile, text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            (
                'engine = "vllm"\n'
                "[[request]]\n"
                'id = "a"\n'
                'argument = "--a"\n'
                'field = "colour"\n'
                'source = "none"'
            ),
            "field: expected one of",
            id="no such field",
        ),
        pytest.param(
            'engine = "vllm"\n[[request]]\nid = "a"\nfield = "moe"\nsource = "none"',
            "expected either argument or variable",
            id="neither argument nor variable",
        ),
        pytest.param(
            (
                'engine = "vllm"\n'
                "[[request]]\n"
                'id = "a"\n'
                'argument = "--a"\n'
                'field = "moe"\n'
                'source = "none"\n'
                'accepts = { x = "(" }'
            ),
            "expected regular expressions",
            id="no regular expression",
        ),
        pytest.param(
            (
                'engine = "vllm"\n'
                "[[request]]\n"
                'id = "a"\n'
                'argument = "--a"\n'
                'field = "moe"\n'
                'source = "none"\n'
                "acepts = {}"
            ),
            "unknown key",
            id="an unknown key",
        ),
    ],
)
def test_a_mistake_in_the_requests_is_one_line(text, expected):
    assert_refused(RequestRules, text, expected)


def test_an_unknown_key_of_the_references_is_one_line():
    text = '[target]\narch="a"\nmodel="b"\ndescription="c"\nwrong=1\n'
    assert_refused(References, text, "unknown key")


def test_two_empty_lists_are_one_line():
    """A file with two empty lists is refused in one line, although pydantic also reports each empty
    list as too short."""

    class Table(data_file.DataTable):
        first: tuple[str, ...] = Field(min_length=1)
        second: tuple[str, ...] = Field(min_length=1)

    with pytest.raises(data_file.DataFileError, match="first"):
        data_file.parse("first = []\nsecond = []\n", Table, "a file")
