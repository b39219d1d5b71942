"""Write fixtures/inventory.toml: the tests of the levels that a certificate needs."""

from pathlib import Path

from sm121.session import certification
from tools.reference.requirements import read_levels


def page(folder: Path) -> str:
    """Return the text of fixtures/inventory.toml, without tests that need an option of their own.

    Args:
        folder: The folder of the tests.

    Raises:
        UsageError: The folder has no test, or a test without a docstring.
    """
    lines = [
        "# The tests of each level that a certificate needs, and what they apply to.",
        "# Made by `sm121 reference docs` from the tests in tests/; do not edit it by hand.",
    ]
    for module in read_levels(folder):
        lines += ["", f"[{module.level}]"]
        for item in module.requirements:
            if not item.optional:
                names = ", ".join(f'"{name}"' for name in item.applies_to)
                lines.append(f'"{folder.name}/{module.file}::{item.name}" = [{names}]')
    lines += ["", "# The digest of each file of the tests.", "[files]"]
    files = certification.digests(folder.parent)
    lines += [f'"{name}" = "{digest}"' for name, digest in files.items()]
    return "\n".join(lines) + "\n"
