"""A mistake in a data file is one line that names the file and what was expected."""

import re
from pathlib import Path

import pytest
from texts import text_file

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


@pytest.mark.parametrize(
    ("kind", "old", "new", "expected"),
    [
        # kind; without `old`, `new` is added to it.
        pytest.param(
            "profile",
            "stalled_after_s = 90",
            "staled_after_s = 90",
            r"key engine\.staled_after_s: unknown key",
            id="profile, stalled_after_s = 90, staled_after_s = 90, key",
        ),
        pytest.param(
            "profile",
            "disk_gib = 2",
            "dsk_gib = 2",
            r"key engine\.needs\.dsk_gib: unknown key; expected one of",
            id="profile, disk_gib = 2, dsk_gib = 2, key",
        ),
        pytest.param(
            "profile",
            "max_abs = 1e-3",
            "max_abs = 0",
            r"log_probability_tolerance\.float32\.max_abs",
            id="profile, max_abs = 1e-3, max_abs = 0",
        ),
        pytest.param(
            "profile",
            "max_answer_tokens = 200",
            'max_answer_tokens = "x"',
            "max_answer_tokens: Input should be",
            id="profile, max_answer_tokens = 200, max_answer_tokens =",
        ),
        pytest.param(
            "profile",
            'under_test = "float32"',
            'under_test = "f32"',
            "under_test: expected one of",
            id='profile, under_test = "float32", under_test = "f32"',
        ),
        ("profile", 'arch = "cpu"', 'arch = "sm12"', "arch: expected one of cpu, sm80"),
        pytest.param(
            "profile",
            "schema_version = 1",
            "schema_version = 2",
            "key schema_version: Input should be 1",
            id="profile, schema_version = 1, schema_version = 2, key",
        ),
        ("profile", "[certify]", "[certify", "expected TOML"),
        ("profile", 'where = "log"', 'where = "logs"', r"rules\.0\.where"),
        pytest.param(
            "profile",
            'when = { configuration = "float32" }',
            'when = { configuration = "flaot32" }',
            "flaot32",
            id='profile, when = { configuration = "float32" }, when = {',
        ),
        pytest.param(
            "profile",
            'when = { configuration = "float32" }',
            'when = { config = "float32" }',
            r"rules\.0\.when",
            id='profile, when = { configuration = "float32" }, when = { (2)',
        ),
        pytest.param(
            "profile",
            'must_not_see = ["Cannot',
            'must_not_see = ["(Cannot',
            "expected a regular expression",
            id='profile, must_not_see = ("Cannot, must_not_see =',
        ),
        ("profile", "tolerance.float32]", "tolerance.flaot32]", "flaot32"),
        ("profile", "max_abs = 1e-3", "max_abs = inf", "max_abs"),
        ("profile", "{ value = 300,", "{ value = nan,", r"ready_within_s\.value"),
        ("profile", "{ value = 300,", "{ value = -1,", r"ready_within_s\.value"),
        ("profile", "[configurations.bfloat16]", '[configurations."../x"]', "configurations"),
        ("profile", "matrix = 1800", "", "matrix is missing"),
        pytest.param(
            "profile",
            'levels = ["smoke", "kernel", "correctness", "stress", "performance"]',
            "levels = []",
            r"certify\.levels: expected smoke, which proves that a server",
            id='profile, levels = ("smoke", "kernel", "correctness"',
        ),
        pytest.param(
            "profile",
            'levels = ["smoke", "kernel", "correctness", "stress", "performance"]',
            'levels = ["smoke"]',
            r"one level that measures or compares \(kernel, ",
            id='profile, levels = ("smoke", "kernel", "correctness" (2)',
        ),
        pytest.param(
            "profile",
            'levels = ["smoke", "kernel", "correctness", "stress", "performance"]',
            'levels = ["kernel", "matrix"]',
            "got kernel, matrix",
            id='profile, levels = ("smoke", "kernel", "correctness" (3)',
        ),
        pytest.param(
            "profile",
            'levels = ["smoke", "kernel", "correctness", "stress", "performance"]',
            'levels = ["smoke", "smoke"]',
            "got smoke, smoke",
            id='profile, levels = ("smoke", "kernel", "correctness" (4)',
        ),
        pytest.param(
            "profile",
            'levels = ["smoke", "kernel", "correctness", "stress", "performance"]',
            'levels = ["smoke", "kernel"]',
            (
                r"certify\.levels: expected performance, too: a certificate needs a number "
                r"for each of performance\.gates \(accepted_length\); got smoke, kernel"
            ),
            id='profile, levels = ("smoke", "kernel", "correctness" (5)',
        ),
        pytest.param(
            "profile",
            "\n[certify]",
            ('\n[plans.nightly]\npurpose = "a try"\ndepths = [0, 4096]\n\n[certify]'),
            r"plans.nightly.depths: expected .*\(0, 512\), got 4096",
            id='profile, (certify), (plans.nightly) purpose = "a try"',
        ),
        pytest.param(
            "profile",
            "\n[certify]",
            ('\n[plans.nightly]\npurpose = "a try"\ngenerated_tokens = [64]\n\n[certify]'),
            "plans.nightly.generated_tokens: expected .*32, 128",
            id='profile, (certify), (plans.nightly) purpose = "a try" (2)',
        ),
        pytest.param(
            "profile",
            "\n[certify]",
            ('\n[plans.nightly]\npurpose = "a try"\nconcurrency = [3]\n\n[certify]'),
            "plans.nightly.concurrency: expected .*2, 8",
            id='profile, (certify), (plans.nightly) purpose = "a try" (3)',
        ),
        pytest.param(
            "profile",
            "\n[certify]",
            ('\n[plans.nightly]\npurpose = "a try"\nlevels = ["smok"]\n\n[certify]'),
            "plans.nightly.levels",
            id='profile, (certify), (plans.nightly) purpose = "a try" (4)',
        ),
        pytest.param(
            "profile",
            "\n[certify]",
            (
                "\n"
                "[plans.nightly]\n"
                'purpose = "a try"\n'
                'levels = ["smoke"]\n'
                'tests.kernel = ["test_x"]\n'
                "\n"
                "[certify]"
            ),
            "tests.kernel: expected a level of",
            id='profile, (certify), (plans.nightly) purpose = "a try" (5)',
        ),
        pytest.param(
            "profile",
            "\n[certify]",
            ('\n[plans.nightly]\npurpose = "a try"\nrouns = 3\n\n[certify]'),
            "plans.nightly.rouns: unknown key",
            id='profile, (certify), (plans.nightly) purpose = "a try" (6)',
        ),
        ("engine", "min_tokens = { can = true", "min_tokens = { cann = true", "cann"),
        ("engine", "seed = {", "sead = {", "sead"),
        ("engine", "echo = { can = true", "echo = { can = false", "expected a reason"),
        ("engine", 'versions = ">=0.19"', 'versions = "new"', "expected versions"),
        ("engine", "[detection]", "[detektion]", "detektion"),
        pytest.param(
            "engine",
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
            id='engine, ((bugs)) checks = ("*") says = "a text"',
        ),
        ("api cases", None, "", "answer_within_s"),
        pytest.param(
            "api cases",
            None,
            ('answer_within_s = 1\nplain = {}\n[[case]]\nid = "a"\nteir = "x"'),
            "teir",
            id="api cases, answer_within_s = 1 plain = {} ((case)) id =",
        ),
        pytest.param(
            "api cases",
            None,
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
            id="api cases, answer_within_s = 1 plain = {} ((case)) id = (2)",
        ),
        pytest.param(
            "signatures",
            None,
            (
                'engine = "vllm"\n'
                "[[signature]]\n"
                'id = "one"\n'
                'field = "attention"\n'
                'hint = ["Using"]\n'
                "regex = '(unclosed'\n"
                'source = "here, log"\n'
                "\n"
            ),
            "one.*regular expression",
            id='signatures, engine = "vllm" ((signature)) id = "one"',
        ),
        pytest.param(
            "signatures",
            None,
            (
                'engine = "vllm"\n'
                "[[signature]]\n"
                'id = "one"\n'
                'field = "atention"\n'
                'hint = ["Using"]\n'
                "regex = 'x'\n"
                'source = "here, log"\n'
                "value = 'y'\n"
            ),
            "one.*field",
            id='signatures, engine = "vllm" ((signature)) id = "one" (2)',
        ),
        pytest.param(
            "signatures",
            None,
            (
                'engine = "vllm"\n'
                "[[signature]]\n"
                'id = "one"\n'
                'field = "attention"\n'
                'hint = ["Using"]\n'
                "regex = 'x'\n"
                'source = "here, log"\n'
                "\n"
            ),
            "one.*exactly one of value and a group",
            id='signatures, engine = "vllm" ((signature)) id = "one" (3)',
        ),
        pytest.param(
            "signatures",
            None,
            (
                'engine = "vllm"\n'
                "[[signature]]\n"
                'id = "one"\n'
                'field = "attention"\n'
                'hint = ["Using"]\n'
                "regex = 'x'\n"
                'source = "here, log"\n'
                "value = true\n"
            ),
            "one.*takes text",
            id='signatures, engine = "vllm" ((signature)) id = "one" (4)',
        ),
        pytest.param(
            "signatures",
            None,
            (
                'engine = "vllm"\n'
                "[[signature]]\n"
                'id = "one"\n'
                'field = "cuda_graphs"\n'
                'hint = ["Using"]\n'
                "regex = 'x'\n"
                'source = "here, log"\n'
                "value = 'yes'\n"
            ),
            "one.*takes true or false",
            id='signatures, engine = "vllm" ((signature)) id = "one" (5)',
        ),
        pytest.param(
            "signatures",
            None,
            (
                'engine = "vllm"\n'
                "[[signature]]\n"
                'id = "one"\n'
                'field = "cuda_graphs"\n'
                'hint = ["Using"]\n'
                "regex = '(?P<value>x)'\n"
                'source = "here, log"\n'
                "\n"
            ),
            "one.*needs mapping",
            id='signatures, engine = "vllm" ((signature)) id = "one" (6)',
        ),
        pytest.param(
            "signatures",
            None,
            (
                'engine = "vllm"\n'
                "[[signature]]\n"
                'id = "one"\n'
                'field = "attention"\n'
                'hint = ["Using"]\n'
                "regex = 'x'\n"
                'source = "here, log"\n'
                "value = 'y'\n"
                "colour = 1\n"
            ),
            "one.*colour",
            id='signatures, engine = "vllm" ((signature)) id = "one" (7)',
        ),
        pytest.param(
            "signatures",
            None,
            (
                'engine = "vllm"\n'
                "[[signature]]\n"
                'id = "one"\n'
                'field = "attention"\n'
                'hint = ["Using"]\n'
                "regex = 'x'\n"
                'source = "here, log"\n'
                "value = 'y'\n"
                "needs = ['nothing']\n"
            ),
            "one.*no fact",
            id='signatures, engine = "vllm" ((signature)) id = "one" (8)',
        ),
        pytest.param(
            "signatures",
            None,
            (
                'engine = "vllm"\n'
                "[[signature]]\n"
                'id = "one"\n'
                'field = "attention"\n'
                'hint = ["Using"]\n'
                "regex = 'x'\n"
                'source = "here, log"\n'
                "value = 'y'\n"
                "file_required = true\n"
            ),
            "one.*file_required needs file",
            id='signatures, engine = "vllm" ((signature)) id = "one" (9)',
        ),
        pytest.param(
            "signatures",
            None,
            (
                'engine = "vllm"\n'
                "[[signature]]\n"
                'id = "one"\n'
                'field = "progress"\n'
                'hint = ["Using"]\n'
                "regex = 'x'\n"
                'source = "here, log"\n'
                "\n"
            ),
            "one.*name of the phase",
            id='signatures, engine = "vllm" ((signature)) id = "one" (10)',
        ),
        pytest.param(
            "signatures",
            None,
            (
                'engine = "vllm"\n'
                "[[signature]]\n"
                'id = "one"\n'
                'field = "attention"\n'
                'hint = ["Using"]\n'
                "regex = 'x'\n"
                'source = "here, log"\n'
                "value = 'y'\n"
                "strength = 99\n"
            ),
            "one.*strength",
            id='signatures, engine = "vllm" ((signature)) id = "one" (11)',
        ),
        pytest.param(
            "failures",
            None,
            (
                "[markers]\n"
                "ready = ['ready']\n"
                "stopped = ['stopped']\n"
                "fatal = ['fatal']\n"
                "quiet = ['x']\n"
                "engine_process = ['core']\n"
                "engine_frame = ['core']\n"
                "[[failure]]\n"
                'id = "one"\n'
                'kind = "oops"\n'
                "rank = 10\n"
                'hint = ["x"]\n'
                "regex = 'x'\n"
                'owner = "me"\n'
                'source = "here, log"\n'
                "\n"
            ),
            "key failure.one.*kind",
            id="failures, (markers) ready = ('ready') stopped =",
        ),
        pytest.param(
            "failures",
            None,
            (
                "[markers]\n"
                "ready = ['ready']\n"
                "stopped = ['stopped']\n"
                "fatal = ['fatal']\n"
                "quiet = ['x']\n"
                "engine_process = ['core']\n"
                "engine_frame = ['core']\n"
                "[[failure]]\n"
                'id = "one"\n'
                'kind = "oom"\n'
                "rank = 10\n"
                'hint = ["x"]\n'
                "regex = '(x'\n"
                'owner = "me"\n'
                'source = "here, log"\n'
                "\n"
            ),
            "key failure.one.*regular expression",
            id="failures, (markers) ready = ('ready') stopped = (2)",
        ),
        pytest.param(
            "failures",
            None,
            (
                "[markers]\n"
                "ready = ['ready']\n"
                "stopped = ['stopped']\n"
                "fatal = ['fatal']\n"
                "quiet = ['x']\n"
                "engine_process = ['core']\n"
                "engine_frame = ['core']\n"
                "[[failure]]\n"
                'id = "one"\n'
                'kind = "oom"\n'
                "rank = 10\n"
                'hint = ["x"]\n'
                "regex = 'x'\n"
                'owner = "me"\n'
                'source = "here, log"\n'
                "summary = '{nothing}'\n"
            ),
            "key failure.one.*summary may name",
            id="failures, (markers) ready = ('ready') stopped = (3)",
        ),
        pytest.param(
            "failures",
            None,
            (
                "[markers]\n"
                "ready = ['ready']\n"
                "stopped = ['stopped']\n"
                "fatal = ['fatal']\n"
                "quiet = ['x']\n"
                "engine_process = ['core']\n"
                "engine_frame = ['core']\n"
                "[[failure]]\n"
                'id = "one"\n'
                'kind = "oom"\n'
                "rank = 10\n"
                'hint = ["x"]\n'
                "regex = 'x'\n"
                'owner = "me"\n'
                'source = "here, log"\n'
                "colour = 1\n"
            ),
            "key failure.one.*colour",
            id="failures, (markers) ready = ('ready') stopped = (4)",
        ),
        pytest.param(
            "kernel names",
            None,
            ('[[name]]\nid = "a"\npart = "colour"\nregex = "x"\nsource = "me and you"'),
            "part",
            id='kernel names, ((name)) id = "a" part = "colour" regex =',
        ),
        pytest.param(
            "kernel names",
            None,
            ('[[name]]\nid = "a"\npart = "moe"\nregex = "("\nsource = "me and you"'),
            "regular expr",
            id='kernel names, ((name)) id = "a" part = "moe" regex =',
        ),
        ("kernel names", None, "", "name"),
        pytest.param(
            "kernels that serve",
            None,
            (
                "[component]\n"
                "[[engine.vllm]]\n"
                'operations = ["route"]\n'
                'source = "here"\n'
                'provider = "nobody"\n'
            ),
            "provider: expected one of torch",
            id="kernels that serve, (component) ((engine.vllm))",
        ),
        pytest.param(
            "kernels that serve",
            None,
            (
                "[component]\n"
                "[[engine.vllm]]\n"
                'operations = ["route"]\n'
                'source = "here"\n'
                'provider = "vllm"\n'
                'nothing = "why"\n'
            ),
            "expected one of provider, nothing, unjudged",
            id="kernels that serve, (component) ((engine.vllm)) (2)",
        ),
        pytest.param(
            "kernels that serve",
            None,
            ('[component]\n[[engine.vllm]]\noperations = ["route"]\nsource = "here"\n\n'),
            "expected one of provider, nothing, unjudged",
            id="kernels that serve, (component) ((engine.vllm)) (3)",
        ),
        ("preflight", 'severity = "error"', 'severity = "fatal"', "severity"),
        ("preflight", "arguments = '--x'", "", "arguments, environment or beside is needed"),
        ("preflight", "arguments = '--x'", "arguments = '('", "regular expression"),
        ("preflight", 'arch = ["sm121"]', 'arch = ["sm999"]', "sm999"),
        pytest.param(
            "preflight",
            'message = "m"',
            'message = "m"\ncolour = 1',
            "colour",
            id='preflight, message = "m", message = "m" colour = 1',
        ),
        ("preflight", "[[rule]]", "[[rule", "expected TOML"),
        pytest.param(
            "requests",
            None,
            (
                'engine = "vllm"\n'
                "[[request]]\n"
                'id = "a"\n'
                'argument = "--a"\n'
                'field = "colour"\n'
                'source = "none"'
            ),
            "field: expected one of",
            id='requests, engine = "vllm" ((request)) id = "a" argument',
        ),
        pytest.param(
            "requests",
            None,
            ('engine = "vllm"\n[[request]]\nid = "a"\nfield = "moe"\nsource = "none"'),
            "expected either argument or variable",
            id='requests, engine = "vllm" ((request)) id = "a" field =',
        ),
        pytest.param(
            "requests",
            None,
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
            id='requests, engine = "vllm" ((request)) id = "a" argument (2)',
        ),
        pytest.param(
            "requests",
            None,
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
            id='requests, engine = "vllm" ((request)) id = "a" argument (3)',
        ),
        ("probes", '"QMMA"', '"QMMA("', "key.*must_see.*expected a regular expression"),
        ("probes", "121a =", '"12.1b" =', "key.*outcomes.*12.1b"),
        ("probes", '"hardware"', '"perhaps"', "key.*outcomes.121a"),
        ("probes", "must_see", "must_sea", "key.*must_sea: unknown key"),
        ("probes", 'tier = "probes"', 'tier = "slow"', "key.*tier"),
        ("probes", '"not supported"', '"("', "key.*refusal"),
        pytest.param(
            "axes",
            None,
            ('[axes.a]\ntitle = "a"\nbaseline = "x"\nvalues = {}'),
            "baseline|at least 2",
            id='axes, (axes.a) title = "a" baseline = "x" values = {}',
        ),
        pytest.param(
            "axes",
            None,
            ("[[incompatible]]\nwhen = { colour = 'red' }\nreason = 'why'\nsource = 'the test'"),
            "expected an axis .* got 'colour'",
            id="axes, ((incompatible)) when = { colour = 'red' } reason",
        ),
        pytest.param(
            "axes",
            None,
            ("[[incompatible]]\nwhen = { dtype = 'int4' }\nreason = 'why'\nsource = 'the test'"),
            "dtype: expected one of float32, bfloat16; got 'int4'",
            id="axes, ((incompatible)) when = { dtype = 'int4' } reason",
        ),
        pytest.param(
            "axes",
            None,
            ("[named.X]\nvalues = { graphs = 'none' }\nsource = 'the test'"),
            "graphs: expected one of",
            id="axes, (named.X) values = { graphs = 'none' } source =",
        ),
        pytest.param(
            "axes",
            None,
            ("[[incompatible]]\nwhen = { dtype = 'float32' }\nreason = 'why'\nsource = 'the test'"),
            "the baseline itself is ruled out",
            id="axes, ((incompatible)) when = { dtype = 'float32' }",
        ),
        pytest.param(
            "axes",
            None,
            "[axes.graphs.values.eager.expected]\npath = { colour = 'red' }",
            "expected TOML",
            id="axes, (axes.graphs.values.eager.expected) path = {",
        ),
        pytest.param(
            "axes",
            "[axes.dtype]\n",
            ("colour = 1\n\n[axes.dtype]\n"),
            "unknown key",
            id="axes, (axes.dtype), colour = 1 (axes.dtype), unknown key",
        ),
        pytest.param(
            "axes",
            None,
            (
                "[axes.x]\n"
                "title = 'x'\n"
                "baseline = 'y'\n"
                "[axes.x.values]\n"
                "z = { not_applicable = 'no' }\n"
                "y = { settings = [{ engine = 'vllm', build = 'mine', source = 'the test' "
                "}] }"
            ),
            r"build: expected a build of builds.toml \(mxfp4, .*\), got 'mine'",
            id="axes, (axes.x) title = 'x' baseline = 'y'",
        ),
        pytest.param(
            "references",
            None,
            ('[target]\narch="a"\nmodel="b"\ndescription="c"\nwrong=1\n'),
            "unknown key",
            id='references, (target) arch="a" model="b" description="c"',
        ),
        ("hypothesis", "change_at_least = 0.10", "change_at_lest = 0.10", "change_at_lest"),
        pytest.param(
            "hypothesis",
            "change_at_least = 0.10",
            "",
            "expected exactly one of change_at_least",
            id="hypothesis, change_at_least = 0.10, expected exactly",
        ),
        pytest.param(
            "hypothesis",
            "no_crash = true",
            'no_crash = true\nlevel = "smoke"',
            "got level, no_crash",
            id="hypothesis, no_crash = true, no_crash = true level =",
        ),
        ("hypothesis", 'phase = "P4"', 'phase = "P9"', "phase"),
    ],
)
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
