"""A run imports only the modules that every run needs, and excludes them from garbage
collection."""

import gc
import subprocess
import sys

from sm121 import plugin

#: Importing each of these modules takes a tenth of a second or more.
FOR_SOME_RUNS = ("aiohttp", "scipy", "torch", "openai")


def test_modules_for_few_runs_are_not_imported_at_start():
    code = f"import sys, sm121.plugin.spine; print(*set({FOR_SOME_RUNS}) & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_imports_are_frozen_and_later_garbage_is_collected():
    before = gc.get_freeze_count()
    with plugin._kept_for_good():
        assert not gc.isenabled()
        imported = [[] for _ in range(1000)]
    assert gc.get_freeze_count() - before >= len(imported)
    assert gc.isenabled()
