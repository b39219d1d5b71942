"""Collect wrong kernels. Each is the right class with one injected fault."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A function that creates a faulty object, and the groups of cases of which one must detect the
    fault."""

    name: str
    make: Callable[[], Any]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class After:
    """A method that changes the result of the original method."""

    change: Callable[..., Any]

    def of(self, right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **keywords: self.change(right(*arguments, **keywords))


@dataclass(frozen=True)
class Before:
    """A method that changes the arguments of the original method. Several arguments are a tuple."""

    change: Callable[..., Any]

    def of(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def broken(its: Any, *arguments: Any, **keywords: Any) -> Any:
            others = self.change(*arguments)
            return right(its, *(others if isinstance(others, tuple) else (others,)), **keywords)

        return broken


#: The attributes of the provider `torch` that contain the classes of its parts: codecs, experts and
#: attention.
PARTS = ("codecs_class", "experts_class", "attention_class")


def broken(right: type, **methods: Any) -> type:
    """Return a subclass in which some methods are replaced by functions or changes.

    The steps of the provider `torch` are methods of its parts, so the class of the part is changed.
    """
    others: dict[str, Any] = {}
    changed: dict[str, dict[str, Any]] = {}
    for name, method in methods.items():
        part = part_of(right, name)
        owner = right if part is None else getattr(right, part)
        if isinstance(method, After | Before):
            method = method.of(getattr(owner, name))
        if part is None:
            others[name] = method
        else:
            changed.setdefault(part, {})[name] = method
    for part, steps in changed.items():
        others[part] = type("BrokenPart", (getattr(right, part),), steps)
    return type("Broken", (right,), others)


def part_of(right: type, name: str) -> str | None:
    """Return the attribute of `PARTS` whose class has this method; None if the class has it."""
    for part in PARTS:
        if not hasattr(right, name) and hasattr(getattr(right, part, None), name):
            return part
    return None


class Catalogue:
    """The mutants of a class, in order. `groups` are the groups of a mutant that names none."""

    def __init__(self, right: type, *groups: str) -> None:
        self.right = right
        self.groups = groups
        self.mutants: list[Mutant] = []

    def mutant(self, name: str, *groups: str) -> Callable[[type], type]:
        """Register a faulty class as a mutant."""

        def register(cls: type) -> type:
            self.mutants.append(Mutant(name, cls, groups or self.groups))
            return cls

        return register

    def method(self, operation: str, name: str, *groups: str) -> Callable[[Any], None]:
        """Register a mutant in which the method of an operation is replaced."""
        return lambda method: self.add(operation, name, method, *groups)

    def add(self, operation: str, name: str, method: Any, *groups: str) -> None:
        self.mutant(name, *groups)(broken(self.right, **{operation: method}))

    def add_all(self, methods: dict[tuple[str, ...], dict[str, Any]]) -> None:
        """Register mutants with replaced methods.

        A key contains the method's name and the groups that must detect its mutants; the values are
        the mutants by their names.
        """
        for (operation, *groups), mutants in methods.items():
            for name, method in mutants.items():
                self.add(operation, name, method, *groups)
