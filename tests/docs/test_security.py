"""SECURITY.md: each promise names a test, and the tests that it names exist."""

import ast
import re

import pytest

from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "SECURITY.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| promise", "| ---"))]


def named_tests(row: str) -> list[tuple[str, str]]:
    """Pairs of file and test; an empty test stands for the whole file. ``::test`` belongs to the file before it."""
    found, file = [], ""
    for path, name in re.findall(r"`((?:tests/[\w/]+\.py)?)(?:::(\w+))?`", row):
        file = path or file
        found.append((file, name))
    return found


@pytest.mark.parametrize("row", ROWS)
def test_promise_names_tests_that_exist(row: str) -> None:
    tests = named_tests(row.split(" | ")[-1])
    assert tests
    for file, name in tests:
        tree = ast.parse((REPOSITORY / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in names if name else any(one.startswith("test_") for one in names), f"{file}::{name}"


def test_all_promises_are_checked() -> None:
    assert len(ROWS) > 15
