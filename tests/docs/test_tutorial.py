"""The tutorial's commands, as they stand there, on a small data set of the same layout."""

from pathlib import Path

import pytest

from tests.builders import mask_bytes, photo_bytes
from tests.docs.pages import REPOSITORY, follows, run_blocks

TUTORIAL = REPOSITORY / "docs" / "tutorial.md"


def test_shapes_of_outputs() -> None:
    printed = "noise\nwrote 3 shards in 0.25 s (key Bengal_7, 50b855d57c0c)\nmore\nepoch 1: loss 2\n"
    assert follows(["wrote 10 shards in 1 s (key Abyssinian_12, 0123456789ab)", "...", "epoch 0: ..."], printed) is None
    assert follows(["epoch 1: loss 2", "wrote 3 shards in ..."], printed) == "wrote 3 shards in ..."
    assert follows(["wrote 3 shards in 0.25 h ..."], printed) == "wrote 3 shards in 0.25 h ..."


@pytest.mark.slow
def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    """Every block in one shell, in order; what a page shows is printed, but for numbers and keys."""
    assert run_blocks(TUTORIAL, folder=tmp_path, PETS=str(_write_pets(tmp_path / "pets"))) >= 10


def _write_pets(directory: Path) -> Path:
    """294 photos in Oxford's layout, two of them not in the list: ten shards of thirty and a short one."""
    (directory / "images").mkdir(parents=True)
    (directory / "annotations" / "trimaps").mkdir(parents=True)
    rows = ["#Image CLASS-ID SPECIES BREED ID"]
    for number in range(294):
        breed, label = (("Abyssinian", 1), ("Bengal", 6), ("Siamese", 33))[number % 3]
        name = f"{breed}_{number}"
        (directory / "images" / f"{name}.jpg").write_bytes(photo_bytes(number, 96, 80))
        (directory / "annotations" / "trimaps" / f"{name}.png").write_bytes(mask_bytes(number, 96, 80))
        if number not in (30, 33):
            rows.append(f"{name} {label} 1 1")
    (directory / "annotations" / "list.txt").write_text("\n".join(rows) + "\n")
    return directory
