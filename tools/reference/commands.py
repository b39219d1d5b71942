"""The page of the subcommands of ``sm121`` and their options."""

import argparse

from tools.reference.markdown import MADE_BY, cell, table


def page(parser: argparse.ArgumentParser) -> str:
    """Return docs/commands.md."""
    lines = [
        "# Commands",
        "",
        MADE_BY.format(source="the commands' own help"),
        "Type `sm121 COMMAND`, or `python -m sm121 COMMAND`. Except `sm121 run` and `sm121 "
        "certify`, the commands do not use pytest. Their exit status is 0; 1 if the result is "
        "negative; 2 after Ctrl-C; 4 if the command line is wrong, with one line that gives the "
        "expected value; 5 if the result could not be judged. "
        "`sm121 merge` has the exit status of the merged run.",
    ]
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        summaries = {}
        for choice in action._choices_actions:
            summaries[choice.dest] = choice.help or ""
        for name, command in action.choices.items():
            lines += ["", f"## sm121 {name}", "", f"{_sentence(summaries.get(name, ''))}", ""]
            rows = []
            for option in command._actions:
                if option.help != argparse.SUPPRESS and not isinstance(
                    option, argparse._HelpAction
                ):
                    rows.append((f"`{_names(option)}`", cell(option.help or "")))
            if rows:
                lines += table(("argument", "meaning"), rows)
    return "\n".join(lines) + "\n"


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
