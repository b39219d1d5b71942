"""The page of the subcommands of ``sm121`` and their options."""

import argparse

from tools.reference.markdown import MADE_BY, cell, code, table

_ARGUMENTS = "[Options of pytest](options.md) lists the arguments."
#: The sentence that leads to the explanation of each command.
EXPLAINED = {
    "run": f"{_ARGUMENTS} [Plans](plans.md) explains which checks a run makes.",
    "certify": (
        f"{_ARGUMENTS} `pytest --certify` makes the same run. [Certificates]"
        "(verdicts.md#certificates) explains what it requires."
    ),
    "matrix": "See [the matrix](matrix.md).",
    "plan": "See [plans](plans.md#what-a-run-does-sm121-plan).",
    "side-by-side": "See [engines](engines.md#side-by-side).",
    "health": "See [watch a running server](spark.md#watch-a-running-server).",
    "path": "See [the kernel path](kernel-path.md).",
    "profile": (
        "See [where the time of a decode goes](kernel-path.md#where-the-time-of-a-decode-goes)."
    ),
    "record": "See [the fingerprint](verdicts.md#the-fingerprint).",
    "init-profile": "See [another model](another-model.md).",
    "box": "See [the box](measurement.md#the-box).",
    "checkpoint": "See [another model's checkpoint](profiles.md#another-models-checkpoint).",
    "compare": "See [beside other engines](regression.md#beside-other-engines).",
    "history": "See [many runs](regression.md#many-runs).",
    "report": "See [the report](report.md).",
    "testlog": "See [documents of the original plan](from-the-plan.md#documents).",
    "trust": "See [against a trusted run](verdicts.md#against-a-trusted-run).",
    "merge": "See [how the parts of a run combine](verdicts.md#how-the-parts-of-a-run-combine).",
    "bundle": "See [send your first run](spark.md#send-your-first-run).",
    "canary": "See [the canary](profiles.md#the-canary).",
    "vocabulary": "See [without a network](spark.md#without-a-network).",
    "golden": "See [the oracle](correctness.md#the-oracle).",
    "warm": "See [cold starts](engines.md#cold-starts).",
    "schema": "See [contracts](contracts.md).",
    "synthetic": (
        "See [gpt-oss's real shape](profiles.md#gpt-osss-real-shape-without-its-weights)."
    ),
    "canary-train": "See [the canary](profiles.md#the-canary).",
    "ablation": "It writes [this table](tables/ablation.md).",
    "tolerances": "It writes [this table](tables/tolerances.md).",
    "reference": "See [what a change needs](../CONTRIBUTING.md#what-a-change-needs).",
}


def page(parser: argparse.ArgumentParser) -> str:
    """Return docs/commands.md.

    Args:
        parser: The parser of ``sm121``, with all of its commands.
    """
    lines = [
        "# Commands",
        "",
        MADE_BY.format(source="the commands' own help"),
        "Type `sm121 COMMAND`, or `python -m sm121 COMMAND`. Except `sm121 run` and `sm121 "
        "certify`, the commands do not use pytest. Their exit status is 0; 1 if the result is "
        "negative; 2 after Ctrl-C; 4 if the command line is wrong, with one line that gives the "
        "expected value; 5 if the result could not be judged. "
        "`sm121 merge` has the exit status of the merged run.",
        "",
        *table(("purpose", "commands"), _groups(parser)),
    ]
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        summaries = {}
        for choice in action._choices_actions:
            summaries[choice.dest] = choice.help or ""
        for name, command in action.choices.items():
            about = f"{_sentence(summaries.get(name, ''))} {EXPLAINED.get(name, '')}".strip()
            lines += ["", f"## sm121 {name}", "", about]
            rows = []
            for option in command._actions:
                if option.help != argparse.SUPPRESS and not isinstance(
                    option, argparse._HelpAction
                ):
                    rows.append((code(_names(option)), cell(option.help or "")))
            if rows:
                lines += ["", *table(("argument", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def _groups(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Return the groups of commands of `sm121 --help`, with a link to each command."""
    rows = []
    groups: dict[str, dict[str, str]] = getattr(parser, "groups", {})
    for title, made in groups.items():
        rows.append((title, ", ".join(f"[{name}](#sm121-{name})" for name in made)))
    return rows


def _names(option: argparse.Action) -> str:
    value = option.metavar or (None if option.nargs == 0 else option.dest.upper())
    shown = value if isinstance(value, str) else " ".join(value or ())
    if option.choices is not None:
        shown = "{" + ",".join(map(str, option.choices)) + "}"
    names = ", ".join(option.option_strings)
    return " ".join(part for part in (names, shown) if part)


def _sentence(text: str) -> str:
    if text:
        return f"{text[:1].upper()}{text[1:]}."
    return ""
