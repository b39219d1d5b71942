"""A catalogue of wrong kernels: each is the right class with one thing broken."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """What makes a broken object, and the groups of cases of which one has to notice."""

    name: str
    make: Callable[[], Any]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class After:
    """In the place of a method: what becomes of its result."""

    change: Callable[..., Any]

    def of(self, right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **keywords: self.change(right(*arguments, **keywords))


@dataclass(frozen=True)
class Before:
    """In the place of a method: what becomes of its arguments, several of which are a tuple."""

    change: Callable[..., Any]

    def of(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def broken(its: Any, *arguments: Any, **keywords: Any) -> Any:
            others = self.change(*arguments)
            return right(its, *(others if isinstance(others, tuple) else (others,)), **keywords)

        return broken


def broken(right: type, **methods: Any) -> type:
    """The class with other methods: functions, or changes of its own."""
    others = {
        name: method.of(getattr(right, name)) if isinstance(method, After | Before) else method
        for name, method in methods.items()
    }
    return type("Broken", (right,), others)


class Catalogue:
    """Mutants of a class, in their order. `groups`: of one that names none."""

    def __init__(self, right: type, *groups: str) -> None:
        self.right = right
        self.groups = groups
        self.mutants: list[Mutant] = []

    def mutant(self, name: str, *groups: str) -> Callable[[type], type]:
        """Register a broken class."""

        def register(cls: type) -> type:
            self.mutants.append(Mutant(name, cls, groups or self.groups))
            return cls

        return register

    def method(self, operation: str, name: str, *groups: str) -> Callable[[Any], None]:
        """Register the class with another method in the place of an operation's."""
        return lambda method: self.add(operation, name, method, *groups)

    def add(self, operation: str, name: str, method: Any, *groups: str) -> None:
        self.mutant(name, *groups)(broken(self.right, **{operation: method}))

    def add_all(self, methods: dict[tuple[str, ...], dict[str, Any]]) -> None:
        """By operation and groups: what stands in the place of the method, by the name."""
        for (operation, *groups), mutants in methods.items():
            for name, method in mutants.items():
                self.add(operation, name, method, *groups)
