"""Links from the documentation to other files of the repository lead to the repository."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\]\(\.\./(?P<path>[^)#]+)")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return _OUTSIDE.sub(rf"]({config['repo_url']}/blob/main/\g<path>", markdown)
