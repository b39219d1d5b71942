"""Checks subclasses of providers that consist of parts, each with some of the operations."""

from collections.abc import Iterable


def refuse_steps(provider: type, base: type, attributes: Iterable[str]) -> None:
    """Refuse a subclass of a provider that replaces a method which only a part has.

    No operation would call it, so that the kernel of the user would not be tested. The method may
    come from a mixin, unless the part has it from the same mixin.

    Args:
        provider: The subclass.
        base: The provider with the parts.
        attributes: The attributes of the subclass that contain the classes of the parts.

    Raises:
        TypeError: The subclass has such a method.
    """
    own = [each for each in provider.__mro__ if each not in base.__mro__]
    steps = [step for each in own for step in vars(each) if not hasattr(base, step)]
    for attribute in attributes:
        part = getattr(provider, attribute)
        for step in steps:
            if hasattr(part, step) and getattr(part, step) is not getattr(provider, step):
                raise TypeError(
                    f"{provider.__name__}.{step}: expected an operation of a kernel provider, got "
                    f"a step of {part.__name__}. Replace it in a subclass of {part.__name__}, and "
                    f"set {attribute} of {provider.__name__} to that class."
                )
