"""The budget of product and tests: the most lines and modules of each folder. Growth must be a decision.

To let a folder grow, change the table in the same commit and give the reason in its message. After a folder shrank,
lower its limit. Lines are those of all Python files of the folder itself, modules those without ``__init__.py``.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MOST = {
    "dali_pipes": (3_560, 16),
    "dali_pipes/cache": (2_060, 7),
    "dali_pipes/commands": (1_700, 6),
    "dali_pipes/data_set": (2_230, 7),
    "dali_pipes/fetch": (1_140, 4),
    "dali_pipes/formats": (3_300, 12),
    "dali_pipes/graph": (3_190, 10),
    "dali_pipes/graph/recipes": (640, 4),
    "dali_pipes/integrations": (850, 4),
    "dali_pipes/metrics": (760, 3),
    "dali_pipes/order": (1_950, 7),
    "dali_pipes/processes": (500, 2),
    "dali_pipes/reader": (1_610, 8),
    "dali_pipes/store": (2_240, 9),
    "dali_pipes/store/cloud": (1_070, 4),
    "dali_pipes/store/cluster": (2_260, 11),
    "dali_pipes/store/http": (1_770, 5),
    "prep": (710, 6),
    "prep/commands": (2_610, 12),
    "prep/embedded": (1_660, 8),
    "prep/etl": (670, 3),
    "prep/inspect": (1_950, 8),
    "prep/pack": (1_000, 3),
    "prep/photos": (470, 2),
    "prep/recode": (630, 2),
    "prep/shuffle": (2_290, 7),
    "prep/sources": (2_080, 10),
    "prep/tar": (450, 2),
    "prep/versions": (1_200, 6),
    "prep/workers": (610, 3),
    "bench": (340, 3),
    "bench/commands": (500, 3),
    "bench/compare": (1_510, 6),
    "bench/engine": (800, 4),
    "bench/gpu": (1_010, 5),
    "bench/loaders": (1_610, 8),
    "bench/loaders/peers": (1_140, 8),
    "bench/reports": (1_390, 6),
    "bench/scenarios": (1_510, 8),
    "bench/tools": (970, 7),
}
"""Folder -> lines, modules."""
SUM_LINES, SUM_MODULES = 57_940, 249


def sizes() -> dict[str, tuple[int, int]]:
    """Lines and modules of each folder of the product."""
    counted: dict[str, tuple[int, int]] = {}
    for package in ("dali_pipes", "prep", "bench"):
        for file in sorted((ROOT / package).rglob("*.py")):
            folder = file.parent.relative_to(ROOT).as_posix()
            lines, modules = counted.get(folder, (0, 0))
            counted[folder] = (lines + file.read_text().count("\n"), modules + (file.name != "__init__.py"))
    return counted


def test_no_folder_is_larger_than_its_budget() -> None:
    """A folder that the table does not name has no budget."""
    larger = {
        folder: f"{lines} lines, {modules} modules; the budget is {most}"
        for folder, (lines, modules) in sizes().items()
        if lines > (most := MOST.get(folder, (0, 0)))[0] or modules > most[1]
    }
    assert not larger


def test_the_table_names_folders_that_there_are() -> None:
    """A folder that went takes its budget along."""
    assert MOST.keys() == sizes().keys()


def test_sums() -> None:
    """Lines and modules of the whole product."""
    assert sum(lines for lines, _ in MOST.values()) <= SUM_LINES
    assert sum(modules for _, modules in MOST.values()) <= SUM_MODULES


TESTS_LINES, FILE_LINES = 43_570, 500
"""The most lines of all tests, and of one test file. A test must find a fault that no other test finds."""


def test_tests_are_within_their_budget() -> None:
    lines = {path: path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py")}
    assert sum(lines.values()) <= TESTS_LINES, "shorten the tests, or raise TESTS_LINES in this commit and say why"
    assert not {str(path): number for path, number in lines.items() if number > FILE_LINES}
