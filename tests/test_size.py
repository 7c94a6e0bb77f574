"""The budget of the product: the most lines and modules of each folder. Growth is a decision and no accident.

Whoever needs more changes the table in the same commit, with the reason in its message; whoever made a folder smaller
lowers its line. Lines are those of all Python files of the folder itself, modules those without ``__init__.py``.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MOST = {
    "dali_pipes": (3_500, 16),
    "dali_pipes/cache": (2_160, 8),
    "dali_pipes/commands": (1_760, 7),
    "dali_pipes/data_set": (2_140, 6),
    "dali_pipes/fetch": (1_000, 3),
    "dali_pipes/formats": (3_340, 13),
    "dali_pipes/graph": (2_980, 12),
    "dali_pipes/graph/recipes": (660, 4),
    "dali_pipes/integrations": (920, 5),
    "dali_pipes/metrics": (840, 6),
    "dali_pipes/order": (2_140, 9),
    "dali_pipes/processes": (480, 2),
    "dali_pipes/reader": (1_520, 6),
    "dali_pipes/store": (2_160, 11),
    "dali_pipes/store/cloud": (1_000, 3),
    "dali_pipes/store/cluster": (2_100, 10),
    "dali_pipes/store/http": (1_880, 5),
    "prep": (740, 7),
    "prep/commands": (2_560, 13),
    "prep/embedded": (1_880, 10),
    "prep/etl": (720, 3),
    "prep/inspect": (2_160, 10),
    "prep/pack": (1_080, 4),
    "prep/photos": (500, 3),
    "prep/recode": (700, 3),
    "prep/shuffle": (2_620, 8),
    "prep/sources": (1_760, 9),
    "prep/tar": (400, 3),
    "prep/versions": (1_200, 7),
    "prep/workers": (580, 3),
    "bench": (340, 3),
    "bench/commands": (640, 5),
    "bench/compare": (1_660, 6),
    "bench/engine": (760, 4),
    "bench/gpu": (1_140, 5),
    "bench/loaders": (1_680, 11),
    "bench/loaders/peers": (1_440, 12),
    "bench/reports": (1_480, 7),
    "bench/scenarios": (1_880, 8),
    "bench/tools": (1_160, 8),
}
"""Folder -> lines, modules."""
SUM_LINES, SUM_MODULES = 59_800, 280


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
