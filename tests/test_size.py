"""The budget of the product: the most lines and modules of each folder. Growth is a decision and no accident.

Whoever needs more changes the table in the same commit, with the reason in its message; whoever made a folder smaller
lowers its line. Lines are those of all Python files of the folder itself, modules those without ``__init__.py``.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MOST = {
    "dali_pipes": (3_140, 15),
    "dali_pipes/cache": (2_380, 8),
    "dali_pipes/commands": (2_120, 8),
    "dali_pipes/data_set": (2_380, 6),
    "dali_pipes/fetch": (1_200, 5),
    "dali_pipes/formats": (3_380, 14),
    "dali_pipes/graph": (3_520, 12),
    "dali_pipes/graph/recipes": (760, 4),
    "dali_pipes/integrations": (1_080, 5),
    "dali_pipes/metrics": (860, 6),
    "dali_pipes/opening": (680, 3),
    "dali_pipes/order": (2_180, 10),
    "dali_pipes/processes": (480, 2),
    "dali_pipes/reader": (1_600, 7),
    "dali_pipes/store": (2_180, 11),
    "dali_pipes/store/cloud": (1_160, 4),
    "dali_pipes/store/cluster": (2_320, 11),
    "dali_pipes/store/http": (1_920, 5),
    "prep": (820, 7),
    "prep/commands": (2_720, 14),
    "prep/embedded": (2_180, 11),
    "prep/etl": (720, 3),
    "prep/inspect": (3_000, 11),
    "prep/pack": (1_120, 4),
    "prep/photos": (540, 4),
    "prep/recode": (860, 4),
    "prep/shuffle": (2_720, 8),
    "prep/sources": (1_980, 9),
    "prep/tar": (480, 3),
    "prep/versions": (1_300, 6),
    "prep/workers": (640, 3),
    "bench": (400, 3),
    "bench/commands": (800, 5),
    "bench/compare": (1_920, 6),
    "bench/engine": (900, 4),
    "bench/gpu": (1_420, 5),
    "bench/loaders": (1_760, 11),
    "bench/loaders/peers": (1_540, 12),
    "bench/reports": (1_680, 7),
    "bench/scenarios": (2_360, 8),
    "bench/tools": (1_280, 8),
}
"""Folder -> lines, modules."""
SUM_LINES, SUM_MODULES = 66_480, 292


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
