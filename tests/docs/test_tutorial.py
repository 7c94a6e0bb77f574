"""The tutorial's commands, as they stand there, on a small data set of the same layout."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import mask_bytes, photo_bytes
from tests.docs.pages import REPOSITORY, blocks_of, follows

TUTORIAL = REPOSITORY / "docs" / "tutorial.md"
END = "@ end of block"


def test_shapes_of_outputs() -> None:
    printed = "noise\nwrote 3 shards in 0.25 s (key Bengal_7, 50b855d57c0c)\nmore\nepoch 1: loss 2\n"
    assert follows(["wrote 10 shards in 1 s (key Abyssinian_12, 0123456789ab)", "...", "epoch 0: ..."], printed) is None
    assert follows(["epoch 1: loss 2", "wrote 3 shards in ..."], printed) == "wrote 3 shards in ..."
    assert follows(["wrote 3 shards in 0.25 h ..."], printed) == "wrote 3 shards in 0.25 h ..."


@pytest.mark.slow
def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    """Every block in one shell, in order; what a page shows is printed, but for numbers and keys."""
    blocks, files = blocks_of(TUTORIAL)
    assert len(blocks) >= 10
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    script = "set -eu\n" + "".join(f"{block.commands}echo '{END}'\n" for block in blocks)
    environment = os.environ | {
        "DALI_PIPES": str(REPOSITORY),
        "PETS": str(_write_pets(tmp_path / "pets")),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "XDG_DATA_HOME": str(tmp_path / "data"),
    }
    environment.pop("AIS_ENDPOINT", None)
    with (tmp_path / "printed.txt").open("wb") as stream:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(timeout=280)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            # What a failed command left in the background, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    printed = (tmp_path / "printed.txt").read_text().split(f"{END}\n")
    for block, text in zip(blocks, printed, strict=False):
        missing = follows(block.shown, text)
        assert missing is None, f"{TUTORIAL.name}:{block.line}: shows {missing!r}, printed was:\n{text}"
    assert code == 0, printed[-1]
    assert len(printed) == len(blocks) + 1


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
