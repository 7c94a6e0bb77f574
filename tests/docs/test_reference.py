"""The reference pages and pictures are what the code says now."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make_reference() -> ModuleType:
    return load("make_reference")


@pytest.mark.parametrize(("page", "function"), [("python.md", "python_page"), ("commands.md", "command_page")])
def test_reference_is_up_to_date(page: str, function: str) -> None:
    """Made in a process of its own: a command keeps the help option under which it was first called."""
    program = f"import sys, make_reference; sys.stdout.write(make_reference.{function}())"
    made = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": f"{DOCS}:{DOCS.parent}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (DOCS / "reference" / page).read_text() == made.stdout, "run `make reference`"


def test_reference_has_everything_public(make_reference: ModuleType) -> None:
    import dali_pipes as dp

    text = make_reference.python_page()
    for name in dp.__all__:
        assert f"\n## dp.{name}\n" in text
    assert "`batch_size`: Samples in a batch, on this rank." in text
    assert "**Raises**" in text


def test_the_picture_is_of_the_plan_as_it_is() -> None:
    """A golden test of a kind: three orders of 192 samples."""
    assert (DOCS / "pictures" / "order.svg").read_text() == load("make_pictures").order_picture()
