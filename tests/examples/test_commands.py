"""The commands that the examples' docstrings show, on tiny data."""

import re
import shlex
from pathlib import Path

import classification
import pytest
import segmentation
from run_files import CHECKPOINT, STEPS, load_checkpoint, save_checkpoint

from dali_pipes.cli import main as dali_pipes_main
from tests.lazy import Lazy
from tests.shards import make_samples

torch = Lazy("torch")

NUM_PHOTOS = 30


def shown_commands(text: str) -> list[list[str]]:
    """What a docstring shows to be typed, continued lines joined."""
    lines = re.sub(r"\\\n\s+", " ", text).splitlines()
    return [shlex.split(line) for line in lines if re.match(r"    (dali-pipes|python|torchrun) ", line)]


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Thirty photos in the layout of the Oxford-IIIT Pet data set."""
    directory = tmp_path / "pets"
    (directory / "images").mkdir(parents=True)
    (directory / "annotations" / "trimaps").mkdir(parents=True)
    rows = []
    for sample in make_samples([(60 + i, 70 - i) for i in range(NUM_PHOTOS)], num_classes=37):
        label = int(sample.components["cls"])
        name = f"breed{label}_{label}"
        (directory / "images" / f"{name}.jpg").write_bytes(sample.components["image.jpg"])
        (directory / "annotations" / "trimaps" / f"{name}.png").write_bytes(sample.components["trimap.png"])
        rows.append(f"{name} {label} 1 1\n")
    (directory / "annotations" / "list.txt").write_text("".join(rows))
    return directory


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
def test_options_of_the_shown_launches_are_there(program: object, capsys: pytest.CaptureFixture[str]) -> None:
    """torchrun's lines name the program, and options that it has."""
    launches = [command for command in shown_commands(str(program.__doc__)) if command[0] == "torchrun"]
    assert len(launches) == 3
    with pytest.raises(SystemExit):
        program.main(["--help"])  # type: ignore[attr-defined]
    known = capsys.readouterr().out
    for command in launches:
        (position,) = [i for i, argument in enumerate(command) if argument.startswith("examples/")]
        assert command[position] == f"examples/{program.__name__}.py"  # type: ignore[attr-defined]
        assert all(argument in known for argument in command[position + 1 :] if argument.startswith("--"))


@pytest.mark.parametrize(
    ("program", "arguments", "text"),
    [
        (segmentation, ["--crop", "100"], "--crop must be a multiple of 16 * --shrink, got 100 and 4"),
        (segmentation, ["--shrink", "0"], "--crop must be a multiple of 16 * --shrink, got 384 and 0"),
        (classification, ["--crop", "8"], "--crop must be at least 16, which the model halves four times, got 8"),
        (classification, ["--epochs", "-1"], "argument --epochs: must be a positive integer, got '-1'"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_read(
    program: object, arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Misused: exit code 2, and the option is named."""
    with pytest.raises(SystemExit, match="2"):
        program.main(["--shards", "nowhere", "--out", str(tmp_path / "run"), *arguments])  # type: ignore[attr-defined]
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("program", [segmentation, classification])
def test_run_that_has_a_checkpoint_is_not_started_anew(
    program: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Misused, and the checkpoint is as it was."""
    save_checkpoint(tmp_path, {"step": 5})
    with pytest.raises(SystemExit, match="2"):
        program.main(["--shards", "nowhere", "--out", str(tmp_path)])  # type: ignore[attr-defined]
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


def test_cat_breeds_are_those_of_the_data_set(pets_dir: Path) -> None:
    """The species column of the real list: 1 for a cat."""
    rows = [line.split() for line in (pets_dir / "annotations" / "list.txt").read_text().splitlines() if line[0] != "#"]
    assert {int(row[1]) for row in rows if row[2] == "1"} == set(classification.CAT_BREEDS)
