"""tools/class_sizes.py: which names count as fields and methods of a class."""

import ast

import pytest

pytest.importorskip("tools")
from tools import class_sizes

FIELDS = """
class C:
    kept: int
    of_all: ClassVar[int] = 1
    constant = 2
    def __init__(self, other):
        self.a, self._b = 1, 2
        self.kept += 1
        other.c = 3
    def _later(self):
        self.d: int = 4
"""
METHODS = """
class C:
    def __init__(self): ...
    def a(self): ...
    def _b(self): ...
    async def c(self): ...
    @property
    def d(self): ...
"""
BASE = "class Base(Elsewhere):\n    a: int\n    def f(self): ...\n"
CHILD = "class Child(module.Base[int]):\n    b: int\n    def f(self): ...\n    def g(self): ...\n"


def sizes(**modules: str) -> dict[str, tuple[int, int]]:
    """Return the numbers of fields and methods of the classes of some modules."""
    classes: list[class_sizes.ClassMembers] = []
    for name, text in modules.items():
        classes += class_sizes.classes_of(name, ast.parse(text))
    return {
        name: (fields, methods) for name, fields, methods in class_sizes.with_inherited(classes)
    }


def test_fields_are_annotated_names_and_attributes_of_self():
    assert sizes(m=FIELDS) == {"m:C": (4, 1)}


def test_methods_are_all_functions_but_dunder_ones():
    assert sizes(m=METHODS) == {"m:C": (0, 4)}


def test_inherited_members_count_once():
    assert sizes(a=BASE, b=CHILD) == {"a:Base": (1, 1), "b:Child": (2, 2)}


def test_a_base_of_its_own_module_comes_first():
    other = "class Base:\n    x: int\n    y: int\n    z: int\n"
    assert sizes(a=BASE + CHILD, b=other)["a:Child"] == (2, 2)
    assert sizes(a=BASE, b=other, c=CHILD)["c:Child"] == (1, 2), "it is not known which"


def test_heirs_are_classes_with_a_base_among_the_counted_ones_but_data_and_errors():
    data = "class Data(BaseModel):\n    a: int\nclass More(Data):\n    b: int\n"
    errors = "class Wrong(ValueError): ...\nclass Worse(Wrong): ...\n"
    classes: list[class_sizes.ClassMembers] = []
    for name, text in {"a": BASE, "b": CHILD, "c": data, "d": errors}.items():
        classes += class_sizes.classes_of(name, ast.parse(text))
    assert [*class_sizes.heirs(classes)] == ["b:Child"]


def test_the_command_prints_the_counts_of_the_named_classes(tmp_path, capsys):
    module = tmp_path / "plugins" / "a.py"
    module.parent.mkdir()
    module.write_text(BASE + CHILD)
    class_sizes.main([str(tmp_path), "Child"])
    assert capsys.readouterr().out == "  2 fields   2 methods  plugins/a.py:Child\n"
    class_sizes.main([str(tmp_path)])
    assert capsys.readouterr().out.count("\n") == 2
