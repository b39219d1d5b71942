"""What talks to pytest. Name it in a root ``conftest.py``: ``pytest_plugins = ["sm121.plugin"]``.

Without collected tests that carry a level marker all of it is inert.
"""

pytest_plugins = (
    "sm121.plugin.options",
    "sm121.plugin.selection",
    "sm121.plugin.slow",
    "sm121.plugin.run",
    "sm121.plugin.workers",
    "sm121.plugin.turns",
    "sm121.plugin.controller",
    "sm121.plugin.recorder",
    "sm121.plugin.crashes",
    "sm121.plugin.fixtures",
    "sm121.plugin.answers",
    "sm121.plugin.abilities",
    "sm121.plugin.api",
    "sm121.plugin.kernels",
    "sm121.plugin.compilation",
    "sm121.plugin.profiling",
    "sm121.plugin.box",
    "sm121.plugin.benchmarks",
    "sm121.plugin.performance",
    "sm121.plugin.regression",
    "sm121.plugin.ab",
    "sm121.plugin.stress",
    "sm121.plugin.matrix",
    "sm121.plugin.resume",
    "sm121.plugin.shards",
    "sm121.plugin.report",
    "sm121.plugin.terminal",
)
