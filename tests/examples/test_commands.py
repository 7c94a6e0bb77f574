"""The commands that the examples' docstrings show, on tiny data."""

import re
import shlex
from pathlib import Path
from typing import Any

import classification
import pytest
import segmentation
from run_files import CHECKPOINT, STEPS, load_checkpoint, save_checkpoint

from dali_pipes.cli import main as dali_pipes_main
from tests.lazy import Lazy
from tests.shards import write_pets

torch = Lazy("torch")

NUM_PHOTOS = 30


def shown_commands(text: str) -> list[list[str]]:
    """What a docstring shows to be typed, continued lines joined."""
    lines = re.sub(r"\\\n\s+", " ", text).splitlines()
    return [shlex.split(line) for line in lines if re.match(r"    (dali-pipes|python|torchrun) ", line)]


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Thirty photos of nearly as many breeds in the layout of the Oxford-IIIT Pet data set."""
    return write_pets(tmp_path / "pets", {f"breed{number}_{number}": 1 + number for number in range(NUM_PHOTOS)})


@pytest.mark.usefixtures("torch_settings")
def test_commands_of_the_docstrings_run_as_shown(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a directory of photos through the embedded node to both trainings; only sizes are others."""
    monkeypatch.setenv("DALI_PIPES_EMBEDDED_DIR", str(tmp_path / "ais"))
    monkeypatch.chdir(tmp_path)
    prepared = [command for command in shown_commands(str(segmentation.__doc__)) if command[0] == "dali-pipes"]
    assert [command[1:3] for command in prepared] == [["prep", "pack"], ["prep", "shuffle"], ["prep", "index"]]
    total_bytes = sum(path.stat().st_size for path in pets.rglob("*.*"))
    in_place = {"DIR": str(pets), "80MiB": str(total_bytes // 8)}
    for command in prepared:
        assert dali_pipes_main([in_place.get(argument, argument) for argument in command[1:]]) == 0
    tiny = ["--epochs", "1", "--batch-size", "4", "--crop", "32", "--device", "cpu"]
    for program, options in ((segmentation, ["--shrink", "1"]), (classification, [])):
        (command,) = [each for each in shown_commands(str(program.__doc__)) if each[0] == "python"]
        assert command[1] == f"examples/{Path(str(program.__file__)).name}"
        capsys.readouterr()
        assert program.main([*command[2:], *tiny, *options]) == 0
        assert "epoch 0: " in capsys.readouterr().out
    assert len((tmp_path / "runs" / "trimaps" / STEPS).read_text().splitlines()) >= 2
    saved = torch.load(tmp_path / "runs" / "breeds" / CHECKPOINT, weights_only=True)
    assert saved["model"]["head.weight"].shape[0] == 37


@pytest.mark.parametrize("program", [segmentation, classification])
def test_run_that_has_a_checkpoint_is_not_started_anew(
    program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path, {"step": 5})
    with pytest.raises(SystemExit, match="2"):
        program.main(["--shards", "nowhere", "--out", str(tmp_path)])
    assert "checkpoint.pt' exists; pass --resume to continue from it, or another --out" in capsys.readouterr().err
    assert load_checkpoint(tmp_path, resume=True) == {"step": 5}


def test_targets_are_species_and_breeds() -> None:
    """Oxford's ids: 1 Abyssinian and 34 Sphynx are cats, 2 an American bulldog and 37 a Yorkshire terrier."""
    species, breeds = classification.targets_of("species"), classification.targets_of("breed")
    assert [classification.TASKS["species"][species[label]] for label in (1, 2, 34, 37)] == ["cat", "dog", "cat", "dog"]
    assert species.tolist().count(0) == 12
    assert species.tolist().count(1) == 25
    assert breeds.tolist() == list(range(-1, 37))
    assert species[0] == -1
