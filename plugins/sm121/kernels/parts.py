"""Checks subclasses of providers that consist of parts, each with some of the operations."""

import inspect
from collections.abc import Iterable, Iterator


def refuse_steps(provider: type, base: type, attributes: Iterable[str]) -> None:
    """Refuse a subclass of a provider that replaces a method which only a part has.

    No operation would call it, so that the kernel of the user would not be tested. The method may
    come from a mixin, unless the part has the same mixin or the same method.

    Args:
        provider: The subclass.
        base: The provider with the parts.
        attributes: The attributes of the subclass that contain the classes of the parts.

    Raises:
        TypeError: The subclass has such a method.
    """
    for attribute in attributes:
        part = getattr(provider, attribute)
        for step, value in _own_attributes(provider, base, part):
            if inspect.getattr_static(part, step, value) is not value:
                raise TypeError(
                    f"{provider.__name__}.{step}: expected an operation of a kernel provider, got "
                    f"a step of {part.__name__}. Replace it in a subclass of {part.__name__}, and "
                    f"set {attribute} of {provider.__name__} to that class."
                )


def _own_attributes(provider: type, base: type, part: type) -> Iterator[tuple[str, object]]:
    """Yield the attributes that a subclass adds to a base, without those that the part has, too."""
    for holder in provider.__mro__:
        if holder in base.__mro__ or holder in part.__mro__:
            continue
        for name, value in vars(holder).items():
            is_of_python = name.startswith("__") or name == "_abc_impl"
            if not is_of_python and not hasattr(base, name):
                yield name, value
