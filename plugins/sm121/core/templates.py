"""Render jinja2 templates. A name without a value is an error."""

import functools
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from sm121.core.printable import printable


@functools.cache
def environment(
    finalize: Callable[[Any], Any] | None = None,
    *,
    package: str = "sm121.report",
    escapes: bool = False,
) -> Environment:
    """Return the templates of a package.

    Args:
        finalize: Applied to each value before it is inserted.
        package: The package that contains the folder ``templates``.
        escapes: Whether inserted values are escaped for HTML and XML.
    """
    return Environment(
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        autoescape=escapes,  # noqa: S701 - most templates produce Markdown
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def rendered(name: str, finalize: Callable[[Any], Any] | None = None, **values: object) -> str:
    """Render a template of the report for a file that is not HTML.

    Args:
        name: The file's name.
        finalize: As in `environment`.
        **values: The values of the names that the template may use.

    Raises:
        jinja2.UndefinedError: The template uses another name.
    """
    return environment(finalize).get_template(name).render(values)


def one_line(value: object) -> str:
    """Return a value's text with escapes for control characters, so that it is one line.

    Args:
        value: Any value; its text is ``str(value)``.
    """
    return printable(str(value))
