"""Checks subclasses of providers whose operations are implemented by several objects, the parts."""

import inspect
from collections.abc import Iterable, Iterator


def refuse_steps(provider: type, base: type, attributes: Iterable[str]) -> None:
    """Refuse a subclass of a provider that overrides a helper method of a provider's part.

    No operation would call a helper method on the provider, so the user's kernel would not be
    tested. A method from a mixin is accepted, unless the part has the same mixin or the same
    method.

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
    """Yield the names and values of the attributes that only the subclass has.

    Attributes of the base class and of the part's base classes are left out.
    """
    for holder in provider.__mro__:
        if holder in base.__mro__ or holder in part.__mro__:
            continue
        for name, value in vars(holder).items():
            is_of_python = name.startswith("__") or name == "_abc_impl"
            if not is_of_python and not hasattr(base, name):
                yield name, value
