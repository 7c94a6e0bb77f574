"""The modules of each package import each other in one direction, types included; a class name stands for one class."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from outside_functions(child)


@pytest.mark.parametrize("package", ["dali_pipes", "prep", "bench"])
def test_no_circle_of_modules(package: str) -> None:
    """Imports inside functions do not count. The error lists the modules of a circle."""
    files = {module_name(path): path for path in (ROOT / package).rglob("*.py")}
    imported: dict[str, set[str]] = {}
    for name, path in files.items():
        found: set[str] = set()
        for node in outside_functions(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= parts & files.keys() or {node.module}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        imported[name] = (found & files.keys()) - {name}
    TopologicalSorter(imported).prepare()


def test_no_public_class_name_twice() -> None:
    """A reader who looks a name up finds one class."""
    found: dict[str, list[str]] = {}
    for package in ("dali_pipes", "prep", "bench"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(module_name(path))
    assert not {name: modules for name, modules in found.items() if len(modules) > 1}
