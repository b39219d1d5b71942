"""List all generated pages, and write them."""

from collections.abc import Callable
from pathlib import Path

from sm121 import cli
from tools.reference import (
    commands,
    configurations,
    crash_classes,
    inventory,
    options,
    plans,
    requirements,
    schema,
)

MADE: dict[str, Callable[[Path], str]] = {
    "requirements.md": lambda docs: requirements.page(docs.parent / "tests", docs),
    "tables/crash-classes.md": lambda _docs: crash_classes.page(),
    "tables/configurations.md": lambda _docs: configurations.page(),
    "commands.md": lambda _docs: commands.page(cli.parser()),
    "tables/schema.md": lambda _docs: schema.page(),
    "../fixtures/inventory.toml": lambda docs: inventory.page(docs.parent / "tests"),
    "options.md": lambda _docs: options.page(),
    "plans.md": plans.page,
}
"""The function that returns the text of each generated file, given the folder `docs` of the
checkout. The keys are file names.
"""


def write(docs: Path) -> list[Path]:
    """Write every generated page.

    Args:
        docs: The folder ``docs`` of the checkout.

    Returns:
        The files.

    Raises:
        UsageError: The checkout has no tests.
    """
    files = []
    for name, make in MADE.items():
        text = make(docs)
        (docs / name).write_text(text, "utf-8")
        files.append(docs / name)
    return files
