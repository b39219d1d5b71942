"""Links from the documentation to other files of the repository lead to the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_RELATIVE = re.compile(r"\]\((?P<path>\.\./[^)#]+)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, found["path"]))
        inside = path.startswith("docs/")
        return found[0] if inside else f"]({config['repo_url']}/blob/main/{path}"

    return _RELATIVE.sub(link, markdown)
