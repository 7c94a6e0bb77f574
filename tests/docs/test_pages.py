"""The README, tutorials and pages that stand alone run as they stand; SECURITY.md names tests that exist."""

import ast
import doctest
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import REPOSITORY, python_of, run_blocks, run_python
from tests.prep.versions.sets import class_folders
from tests.shards import make_samples, mask_bytes, photo_bytes, write_pets, write_shards

README, DOCS = REPOSITORY / "README.md", REPOSITORY / "docs"
MAX_LINES = 120


def test_readme_is_short_and_its_training_loop_runs(tmp_path: Path) -> None:
    assert len(README.read_text().splitlines()) <= MAX_LINES
    write_shards(tmp_path / "shards", make_samples([(80, 72)] * 6), per_shard=3)
    assert README.read_text().count("```python\n") == 1
    assert run_python("-c", python_of(README), folder=tmp_path) == "6 1\n"


def test_how_it_works_shows_what_its_python_prints(tmp_path: Path) -> None:
    """Every number on the page is computed again, in a process and a folder of its own."""
    # Without the fences, which a doctest would take for expected output.
    text = re.sub(r"^```.*$", "", (DOCS / "how-it-works.md").read_text(), flags=re.MULTILINE)
    assert len(doctest.DocTestParser().get_examples(text)) > 30
    (tmp_path / "page.txt").write_text(text)
    run_python("-c", "import doctest, sys; sys.exit(doctest.testfile('page.txt', False).failed)", folder=tmp_path)


def test_the_page_of_data_sets_that_grow_runs(tmp_path: Path) -> None:
    class_folders(tmp_path / "photos", {"cat": 6, "dog": 6})
    class_folders(tmp_path / "more", {"dog": 2, "fox": 2}, first=50)
    assert run_blocks(DOCS / "how-to" / "living-data-sets.md", folder=tmp_path) >= 6


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_the_tutorial_runs(tmp_path: Path) -> None:
    """On 294 photos in Oxford's layout, two of them not in the list: ten shards of thirty and a short one."""
    breeds = (("Abyssinian", 1), ("Bengal", 6), ("Siamese", 33))
    named = [(f"{breeds[number % 3][0]}_{number}", breeds[number % 3][1]) for number in range(294)]
    directory = write_pets(tmp_path / "pets", dict(named))
    for number, (name, _) in enumerate(named):
        (directory / "images" / f"{name}.jpg").write_bytes(photo_bytes(number, 96, 80))
        (directory / "annotations" / "trimaps" / f"{name}.png").write_bytes(mask_bytes(number, 96, 80))
    rows = (directory / "annotations" / "list.txt").read_text().splitlines(keepends=True)
    left = [row for row in rows if row.split()[0] not in (named[30][0], named[33][0])]
    (directory / "annotations" / "list.txt").write_text("".join(left))
    assert run_blocks(DOCS / "tutorial.md", folder=tmp_path, PETS=str(directory)) >= 10


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_the_tutorial_of_class_folders_ends_with_a_model_that_has_learned_something(tmp_path: Path) -> None:
    """Held-out tiles lie beside those that were trained on, and share no pixel with them."""
    pytest.importorskip("skimage")
    assert run_blocks(DOCS / "tutorial-class-folders.md", folder=tmp_path) == 4
    found = re.search(r"accuracy ([\d.]+) on (\d+) held-out photos", (tmp_path / "printed.txt").read_text())
    assert found is not None
    assert float(found[1]) > 0.6
    assert 50 < int(found[2]) < 110


def test_promises_of_security_name_tests_that_exist() -> None:
    """Files and tests in backticks; ``::test`` belongs to the file before it."""
    lines = (REPOSITORY / "SECURITY.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| promise", "| ---"))]
    assert len(rows) > 15
    for row in rows:
        named, file = re.findall(r"`((?:tests/[\w/]+\.py)?)(?:::(\w+))?`", row.split(" | ")[-1]), ""
        assert named, row
        for path, name in named:
            file = path or file
            tree = ast.parse((REPOSITORY / file).read_text())
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in names if name else any(one.startswith("test_") for one in names), f"{file}::{name}"


# The reference pages and pictures are what the code says now


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_the_picture_is_of_the_plan_as_it_is() -> None:
    """The stored picture is the one that the plan gives now."""
    assert (DOCS / "pictures" / "order.svg").read_text() == load("make_pictures").order_picture()
