"""The text output of ``sm121 path`` and ``sm121 box``: a table of names and texts."""

from sm121.core import templates


def table(template: str, **values: object) -> str:
    """Return the rows of a template in two columns.

    Args:
        template: The name of the template. Each of its lines is a name, a tab and a text.
        **values: The values of the template.
    """
    rows = []
    for line in templates.rendered(template, templates.one_line, **values).splitlines():
        name, _, text = line.partition("\t")
        rows.append((name, text))
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:{width}}  {text}\n" for name, text in rows)
