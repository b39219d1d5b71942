"""Checks subclasses of providers that consist of parts, each with some of the operations."""

from collections.abc import Iterable


def refuse_steps(provider: type, base: type, attributes: Iterable[str]) -> None:
    """Refuse a subclass of a provider that replaces a method which only a part has.

    No operation would call it, so that the kernel of the user would not be tested.

    Args:
        provider: The subclass.
        base: The provider with the parts.
        attributes: The attributes of the subclass that contain the classes of the parts.

    Raises:
        TypeError: The subclass has such a method.
    """
    for attribute in attributes:
        part = getattr(provider, attribute)
        for step in vars(provider):
            if hasattr(part, step) and not hasattr(base, step):
                raise TypeError(
                    f"{provider.__name__}.{step}: expected an operation of a kernel provider, got "
                    f"a step of {part.__name__}. Replace it in a subclass of {part.__name__}, and "
                    f"set {attribute} of {provider.__name__} to that class."
                )
