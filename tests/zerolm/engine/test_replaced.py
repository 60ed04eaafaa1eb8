"""`REPLACED` lists what is replaced in other libraries: no more, and no less."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT, tracked
from zerolm.engine import replaced
from zerolm.engine.replaced import NAMES, REPLACED

SOURCES = {
    path: path.read_text()
    for path in tracked("pretrain.py", "zerolm/**/*.py", "launch/**/*.py", "data_prep/**/*.py")
    if path != Path(replaced.__file__)
}
COMMON = {"step", "load", "forward"}  # names that objects of the project have too
WRAPPERS = {"staticmethod", "classmethod", "partial", "partialmethod", "wraps"}
OF_PYTHON = {"excepthook", "spawnv_passfds"}  # the standard library's, in common/
ROWS = [(owner, name) for owner, rows in REPLACED.items() for name in rows]


@pytest.mark.parametrize(("owner", "name"), ROWS)
def test_what_is_replaced_exists_in_the_installed_version(owner, name):
    module, _, kind = owner.partition(":")
    found: Any = importlib.import_module(module)
    found = getattr(found, kind) if kind else found
    assert hasattr(found, name) or f"self.{name} = " in inspect.getsource(found)


def test_each_row_names_the_modules_that_replace_it():
    for rows in REPLACED.values():
        for name, row in rows.items():
            for module in row.by.split():
                source = (ROOT / "zerolm" / f"{module.replace('.', '/')}.py").read_text()
                assert f'"{name}"' in source and "replaced.install" in source, (module, name)


def test_each_replacement_has_a_row_of_its_module():
    for path, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("replaced.install"):
                name = node.args[1]
                if isinstance(name, ast.Constant):
                    module = ".".join(path.relative_to(ROOT / "zerolm").with_suffix("").parts)
                    rows = [rows[name.value] for rows in REPLACED.values() if name.value in rows]
                    assert any(module in row.by.split() for row in rows), (module, name.value)


def replacements(source: str) -> Iterator[str]:
    """Yield the assignments of functions and classes to attributes of objects."""
    tree = ast.parse(source)
    kinds = ast.FunctionDef, ast.ClassDef
    defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}

    def is_function(value: ast.expr) -> bool:
        if isinstance(value, ast.Call):
            return ast.unparse(value.func).rpartition(".")[2] in WRAPPERS
        return isinstance(value, ast.Lambda) or ast.unparse(value) in defined

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                each = target.elts if isinstance(target, ast.Tuple) else [target]
                for one in each:
                    if isinstance(one, ast.Attribute) and ast.unparse(one.value) not in (
                        "self", "cls",
                    ):  # fmt: skip
                        known = one.attr in NAMES - COMMON or one.attr == "__class__"
                        if known or (is_function(node.value) and one.attr not in OF_PYTHON):
                            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "mock.patch.object" or (name == "setattr" and is_function(node.args[-1])):
                yield ast.unparse(node)


def test_nothing_else_replaces_attributes_of_other_libraries():
    found = [(path, line) for path, source in SOURCES.items() for line in replacements(source)]
    assert not found, "use zerolm.engine.replaced"
    for line in (
        "engine._copy_recovery_script = None",
        "def f(): ...\noptimizer.inner.sum = f",
        "linear.go = staticmethod(f)",
        "head.__class__ = Head",
        "setattr(x, name, lambda: True)",
        "mock.patch.object(x, 'y', f)",
    ):
        assert list(replacements(line)), line


def test_a_replacement_without_a_row_fails_and_others_are_undone():
    class Kind:
        def load(self) -> int:
            return 1

    with pytest.raises(AssertionError, match="absent is not in REPLACED"):
        replaced.install(Kind, "absent", None)
    one = Kind()
    with replaced.installed(one, "load", lambda: 2), replaced.installed(Kind, "load", lambda _: 3):
        assert (one.load(), Kind().load()) == (2, 3)
    assert one.load() == Kind().load() == 1 and not vars(one)
