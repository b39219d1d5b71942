"""What ``sm121 path`` and ``sm121 box`` print for people: one row for each question."""

from sm121.core import templates


def table(template: str, **values: object) -> str:
    """The rows of a template, each a name and a text, in two columns."""
    lines = templates.rendered(template, templates.one_line, **values).splitlines()
    rows = [(name, text) for name, _, text in (line.partition("\t") for line in lines)]
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:{width}}  {text}\n" for name, text in rows)
