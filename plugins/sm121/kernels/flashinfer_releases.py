"""The functions of FlashInfer that not every release has (`fixtures/kernels/flashinfer.toml`)."""

import functools
import importlib
import inspect
from typing import Any

from pydantic import Field

from sm121.core import data_file
from sm121.core.verdict import NotRun


class _Api(data_file.DataTable):
    name: str
    #: An argument of the function; None for the function itself.
    argument: str | None = None
    #: The first release that has the function or the argument.
    since: str = Field(pattern=r"^\d+(\.\d+)+$")
    source: str = Field(min_length=3)


class _ApiData(data_file.DataTable):
    #: The releases whose wheels were searched for these functions.
    releases: tuple[str, ...]
    api: tuple[_Api, ...]


def api_data() -> _ApiData:
    """Return the content of `flashinfer.toml`.

    Raises:
        DataFileError: The file is malformed.
    """
    return data_file.load("kernels/flashinfer.toml", _ApiData)


@functools.cache
def since() -> dict[tuple[str, str | None], str]:
    """Return the first release that has each function or argument.

    A key is a function's name with an argument's name, or with None for the function itself.
    """
    return {(row.name, row.argument): row.since for row in api_data().api}


def find_function(module: str, name: str, arguments: tuple[str, ...], version: str | None) -> Any:
    """Return a function of FlashInfer.

    Args:
        module: The function's module.
        name: The function's name.
        arguments: The arguments that the function must accept by name.
        version: The installed release; None if it is unknown.

    Raises:
        NotRun: The installed release lacks the function, or one of the arguments.
    """
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # the module exists, but a package that it imports is missing
        function = None
    if function is None:
        raise _too_old(name, None, f"no {module}.{name}", version)
    parameters = inspect.signature(function).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return function
    for argument in arguments:
        if argument not in parameters:
            raise _too_old(name, argument, f"no {argument}= of {name}", version)
    return function


def _too_old(name: str, argument: str | None, lacks: str, version: str | None) -> NotRun:
    first = since().get((name, argument))
    if first is None:
        needed = "another release may have it"
        requirement = "another flashinfer-python"
    else:
        needed = f"{first} or newer has it"
        requirement = f"'flashinfer-python>={first}'"
    return NotRun(
        f"FlashInfer {version or '(version not known)'} has {lacks}: {needed}; pip install "
        f"{requirement}, with a vLLM release that supports this version"
    )
