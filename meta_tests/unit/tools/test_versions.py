"""The page on releases of vLLM is made from the recorded runs and the present data files."""

import json

from meta_tests.folders import ROOT
from tools import versions


def test_the_page_has_the_known_bugs_of_today():
    """Without new runs, the page still shows the known bugs of today.

    `make versions` takes an hour, and the page without new runs takes no time.
    """
    known = json.loads(versions.DATA.read_text("utf-8"))
    page = (ROOT / "docs" / "tables" / "vllm-versions.md").read_text("utf-8")
    assert page == versions.page(known)
