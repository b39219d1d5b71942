"""Before any test runs, reject options of pytest-benchmark with which nothing would be compared."""

import importlib.util
from pathlib import Path

import pytest

from pytest_bench_gate.history import OPTION, option

_FAIL = "--benchmark-compare-fail"
#: The message about that option without `OPTION`.
FAIL_ALONE = f"{_FAIL}: expected {OPTION} with it, which names the stored run. Add it"
#: Prefixes of the storage URLs that pytest-benchmark supports.
_STORAGES = ("file://", "elasticsearch+")
#: Why gates are not judged in a run with workers.
WITH_WORKERS = "no time is measured while other workers run. Leave out -n"


def is_worker(config: pytest.Config) -> bool:
    """Check whether this process is a worker of pytest-xdist.

    Args:
        config: The configuration of the run.
    """
    return hasattr(config, "workerinput")


def starts_workers(config: pytest.Config) -> bool:
    """Check whether this process starts workers of pytest-xdist.

    Args:
        config: The configuration of the run.
    """
    return config.getoption("dist", "no") != "no" and not is_worker(config)


def is_compared(config: pytest.Config) -> bool:
    """Check whether the user requested a comparison with a stored run.

    Args:
        config: The configuration of the run.
    """
    return config.getoption("benchmark_compare", None) not in (None, [])


def refuse_what_crashes(config: pytest.Config) -> None:
    """Reject values with which pytest-benchmark would crash during its configuration.

    Args:
        config: The configuration of the run.

    Raises:
        pytest.UsageError: ``--benchmark-compare`` has a path that does not exist, or
            ``--benchmark-storage`` is empty or has a URL of an unsupported kind.
    """
    _refuse_storage(config)
    named = config.getoption("benchmark_compare", None)
    if not isinstance(named, str) or Path(named).is_file():
        return
    if len(Path(named).parts) > 2 or Path(named).is_absolute():
        raise pytest.UsageError(no_run(option(config), named))


def _refuse_storage(config: pytest.Config) -> None:
    storage = config.getoption("benchmark_storage", None)
    if storage == "":
        raise pytest.UsageError(
            "--benchmark-storage '': expected a folder, got an empty value. Leave the option out, "
            "or set the variable that its value comes from"
        )
    if not isinstance(storage, str) or "://" not in storage:
        return
    if not storage.startswith(_STORAGES):
        raise pytest.UsageError(
            f"--benchmark-storage {storage}: expected a folder, file://FOLDER or "
            "elasticsearch+http://HOST. Name one of them"
        )
    if not storage.startswith("file://") and importlib.util.find_spec("elasticsearch") is None:
        raise pytest.UsageError(
            f"--benchmark-storage {storage}: expected the package elasticsearch, got none. "
            "Install it, or name a folder"
        )


def refuse_paths(config: pytest.Config) -> None:
    """Reject a path of tests that ``--benchmark-compare`` has taken for a stored run.

    The tests of this path are then not collected, so the other tests may have no gate.

    Args:
        config: The configuration of the run, after pytest-benchmark has read its options.

    Raises:
        pytest.UsageError: The value is a path, and there is no stored run of this name.
    """
    named = config.getoption("benchmark_compare", None)
    session = getattr(config, "_benchmarksession", None)
    if session is None or not isinstance(named, str) or not named.strip():
        return
    path = config.invocation_params.dir / named.partition("::")[0]
    if path.exists() and not any(session.storage.load(named)):
        raise pytest.UsageError(no_run(option(config), named))


def no_run(name: str, value: str) -> str:
    """Return the message about an option that has a path in place of a stored run.

    Args:
        name: The option.
        value: Its value.
    """
    return (
        f"{name} {value!r}: expected the number of a stored run or its file, got neither. "
        f"The option takes the next word as its value: write paths first, or {name}=0001"
    )


def refuse(config: pytest.Config) -> None:
    """Reject options that contradict each other.

    Args:
        config: The configuration of a run that has a test with a gate.

    Raises:
        pytest.UsageError: With these options, no gate would be compared.
    """
    if not is_compared(config):
        if config.getoption("benchmark_compare_fail", None):
            raise pytest.UsageError(FAIL_ALONE)
        return
    why = why_not_run(config)
    if why is not None:
        raise pytest.UsageError(f"{option(config)}: {why}")


def why_not_run(config: pytest.Config) -> str | None:
    """Return why gates are not judged in this process; None if they are.

    Args:
        config: The configuration of the run.
    """
    if is_worker(config):
        return WITH_WORKERS
    if config.getoption("benchmark_skip", False) and not config.getoption("benchmark_only", False):
        return "--benchmark-skip measures nothing. Leave it out"
    is_disabled = config.getoption("benchmark_disable", False)
    if is_disabled and not config.getoption("benchmark_enable", False):
        return "--benchmark-disable times nothing. Leave it out"
    return None
