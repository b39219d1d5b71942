"""Text that is made of a template (jinja2), in which a name that was not given is an error."""

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
    """The templates of a package. `finalize`: makes what is put in of each value; `escapes`: what
    is put in is no markup of HTML or XML."""
    return Environment(
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        autoescape=escapes,  # noqa: S701 - most of them make Markdown
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def rendered(name: str, finalize: Callable[[Any], Any] | None = None, **values: object) -> str:
    """The text of a template of the report's that is no HTML. `finalize` as of `environment`."""
    return environment(finalize).get_template(name).render(values)


def one_line(value: object) -> str:
    """Text without anything that a screen obeys."""
    return printable(str(value))
