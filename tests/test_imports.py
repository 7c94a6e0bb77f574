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


PRINTING = {
    "dali_pipes.commands.output": ["print_line"],
    "dali_pipes.commands.doctor": ["doctor", "completion"],  # findings made safe by `printable`; a shell script
    "dali_pipes.commands.profile": ["profile"],  # figures
    "dali_pipes.commands.tune": ["tune"],  # figures
    "prep.commands.embedded": ["embedded"],  # a warning without text from data
    "prep.commands.make": ["make"],  # the text of a program
    "prep.etl.__main__": ["main"],  # it runs without click; the pod logs its output
    # Tables of figures and our own errors hold no text from data.
    "bench.commands.gpu": ["gpu"],
    "bench.commands.report": ["report", "compare"],
    "bench.demo": ["demo", "_step"],
    "bench.engine.options": ["run_and_tell", "_tell"],
    "bench.gpu.scenario": ["take_scenario"],
    "bench.tools.gateway": ["main"],  # its address, for the process that started it
}
"""Functions that may print other text than JSON and constants; all others call `print_line`."""


NO_TEXT = ("file", "flush", "err", "nl", "fg", "bold", "end", "sep")
"""Arguments of functions that print, but not what they print."""


def prints(call: ast.Call) -> bool:
    """Whether a call writes text to stdout or stderr that is neither a constant nor JSON, which escapes itself."""
    name = ast.unparse(call.func)
    is_printing = name.rpartition(".")[2] in ("print", "echo", "secho", "print_exc") or name.startswith(
        ("sys.stdout.write", "sys.stderr.write", "sys.stdout.buffer", "sys.stderr.buffer")
    )
    texts = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg not in NO_TEXT)]
    return is_printing and not all(is_harmless(text) for text in texts)


def is_harmless(text: ast.expr) -> bool:
    return isinstance(text, ast.Constant) or (isinstance(text, ast.Call) and ast.unparse(text.func) == "json.dumps")


def test_only_functions_for_it_print() -> None:
    """`print_line` escapes text from data. Printed in another way, such text could send control codes to a terminal."""
    found: dict[str, list[str]] = {}
    for package in ("dali_pipes", "prep", "bench"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if any(isinstance(call, ast.Call) and prints(call) for call in ast.walk(node)):
                    found.setdefault(module_name(path), []).append(getattr(node, "name", "?"))
    assert found == PRINTING


def test_test_modules_do_not_import_torch_or_dali() -> None:
    """Cheap tests start fast: `tests.lazy` imports a package at its first use. Trainers' tests may import torch."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "tests").rglob("test_*.py")
        if "trainers" not in path.parts
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(name.split(".")[0] in ("torch", "nvidia", "lightning", "ray") for name in imported_by(node))
    ]
    assert not found


def imported_by(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
