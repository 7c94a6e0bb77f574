"""``prep make``: from every kind of source to data sets that load, in one go, in parts, and again."""

import contextlib
import io
import re
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import columns_name, manifest_name, version_start
from dali_pipes.store.local import LocalStore
from tests.docs.pages import run_python
from tests.prep.commands.calls import json_of_prep, run_prep
from tests.prep.versions.sets import class_folders
from tests.shards import files_of, photo_bytes, tar_bytes, write_pets

_make = partial(run_prep, "make")
_json = partial(json_of_prep, "make")
SHARES = "train=0.7,val=0.3"
QUICK = ("--no-verify",)
"""Verifying starts DALI in a process of its own, for each data set."""


def run_program(program: str) -> list[str]:
    """The lines that a program prints. One test runs it in a process of its own, as users do; here imports are done."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "program", "exec"), {})
    return printed.getvalue().splitlines()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Forty photos in two classes, and a file that is none."""
    folder = class_folders(tmp_path / "photos", {"cat": 20, "dog": 20})
    (folder / "cat" / "Thumbs.db").touch()
    return folder


def _bytes_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {name: (data, (folder / name).stat().st_mtime_ns) for name, data in files_of(folder).items()}


def test_folder_to_first_batch_is_one_command_and_its_program(photos: Path, tmp_path: Path) -> None:
    """What it prints to stdout is a program that runs; the rest is said on stderr."""
    done = _make(photos, tmp_path / "out", "--split", SHARES)
    for said in (
        "is class folders: 'cat', 'dog'",
        "1  no pictures: .db: not a photo by its extension",
        "pack: wrote 1 shard, 40 samples",
        "shuffle: shuffled 1 shard into ",
        "nothing is wrong with 1 shard",
    ):
        assert said in done.stderr
    assert not (tmp_path / "out" / "unshuffled").exists()
    printed = run_python("-c", done.stdout, folder=tmp_path).splitlines()
    numbers = [int(line.split()[1].rstrip(",")) for line in printed if "samples" in line]
    assert sum(numbers) == 40
    assert printed[1] == repr({"image": (numbers[0], 3, 224, 224), "label": (numbers[0],)})
    assert printed[3] == repr({"image": (numbers[1], 3, 224, 224), "label": (numbers[1],)})


def test_run_again_writes_only_what_is_lacking(photos: Path, tmp_path: Path) -> None:
    """The files get the same bytes again. If no file is lacking, the command writes none, and says so."""
    out = tmp_path / "out"
    first = _json(*QUICK, photos, out, "--split", SHARES)
    made = _bytes_of(out)
    again = _make(*QUICK, photos, out, "--split", SHARES)
    assert again.stdout == first["python"]
    assert again.stderr.count("there already") == 4  # pack, shuffle, and the indexes of both splits
    assert _bytes_of(out) == made
    for name in ("unshuffled/samples-000000.tar", "train-000000.tar", columns_name("val-"), manifest_name("val-")):
        (out / name).unlink()
    _make(*QUICK, photos, out, "--split", SHARES)
    after = _bytes_of(out)
    assert {name: data for name, (data, _) in after.items()} == {name: data for name, (data, _) in made.items()}


def test_changed_source_is_an_error_until_overwrite_is_asked_for(photos: Path, tmp_path: Path) -> None:
    arguments = (*QUICK, photos, tmp_path / "out")
    assert "shuffle, index, verify: would write" in _make(*arguments, "--dry-run").stderr
    _make(*arguments)
    made = _bytes_of(tmp_path / "out")
    (photos / "cat" / "40.jpg").write_bytes(photo_bytes(40, 64, 48))
    _make(*arguments, expect=StoreError, match="holds shards with other content: .*--overwrite")
    assert _bytes_of(tmp_path / "out") == made
    found = _json(*arguments, "--overwrite")["sets"]
    assert [(one["num_samples"], one["was_indexed"]) for one in found] == [(41, False)]


def test_photos_that_two_splits_have_are_told(tmp_path: Path) -> None:
    """With training photos among them, the validation photos give figures that are too good."""
    photos = class_folders(tmp_path / "photos", {"cat": 20})
    assert "two splits" not in _make(*QUICK, photos, tmp_path / "apart", "--split", SHARES).stderr
    (photos / "cat").rename(photos / "dog")
    class_folders(photos, {"cat": 20})
    said = _make(*QUICK, photos, tmp_path / "out", "--split", SHARES).stderr
    assert re.search(
        r"equal photos in two splits: .*/val-: \d+ of \d+ photos are known, under other keys: '.*/train-'", said
    )


def test_bad_data_end_with_1(photos: Path, tmp_path: Path) -> None:
    """Bad data give exit code 1, unless the user allows as many; bad photos that are kept count."""
    cut = photos / "cat" / "002.jpg"
    cut.write_bytes(cut.read_bytes()[:-30])
    _make(photos, tmp_path / "out", expect=DataError, match=r"1 of 40 records .* cat/002: jpg is cut off")
    assert _json(*QUICK, photos, tmp_path / "skip", "--on-bad", "skip")["sets"][0]["num_samples"] == 39
    keep = (photos, tmp_path / "keep", "--on-bad", "keep")
    made = _make(*keep)
    assert "bad photos or samples: 1; --max-bad allows them, so the exit code is 0" in made.stderr
    assert ', bad_samples=dp.BadSamples(on_error="substitute")) as' in made.stdout
    done = _make(*keep, "--max-bad", "0", expect=SystemExit, match="1")
    assert "1 problem, 1 bad sample" in done.stderr


def test_split_that_is_not_trained_on_gets_a_graph_for_it(tmp_path: Path) -> None:
    """A split's folder may have a year in its name, as COCO's have."""
    class_folders(tmp_path / "in", {"Train2017/cat": 1, "Val2017/cat": 1})
    _make(tmp_path / "in", tmp_path / "out", "--split", SHARES, expect=ValueError, match="has the splits Train2017")
    program = _make(*QUICK, tmp_path / "in", tmp_path / "out").stdout
    assert '/Train2017-", dp.classification_train(), batch_size=1, seed=0)' in program
    assert '/Val2017-", dp.classification_eval(), batch_size=1, seed=0, last_batch_policy="PARTIAL")' in program


def test_program_has_the_masks_that_were_named(tmp_path: Path) -> None:
    """A PNG beside a JPEG is a mask unless the user says otherwise."""
    Image.new("L", (64, 48), 3).save(tmp_path / "a.png")
    (tmp_path / "a.jpg").write_bytes(photo_bytes(1, 64, 48))
    (tmp_path / "texts.csv").write_text("path,text\na.jpg,a cat\n")
    texts = ("--component", "image=path", "--component", "caption.txt=text")
    program = _make(*QUICK, tmp_path / "texts.csv", tmp_path / "texts", *texts).stdout
    assert 'dp.captions(text="caption.txt", tokens=None), ' in program
    assert "'text': 1" in run_program(program)[1]
    (tmp_path / "list.csv").write_text("path,label,depth\na.jpg,cat,a.png\n")
    columns = ("--component", "image=path", "--component", "depth=depth")
    command = (*QUICK, tmp_path / "list.csv", tmp_path / "out", *columns)
    assert "dp.classification_train(), " in _make(*command, "--no-masks").stdout
    assert "dp.segmentation(), " in _make(*command, "--overwrite").stdout
    assert 'dp.segmentation(mask="depth.png"), ' in _make(*command, "--mask", "depth.png").stdout


def test_overwriting_names_the_data_sets_of_an_earlier_split(photos: Path, tmp_path: Path) -> None:
    """Its samples would be trained on and tested with."""
    _make(*QUICK, photos, tmp_path / "out", "--split", "train=0.6,val=0.2,test=0.2")
    said = _make(*QUICK, photos, tmp_path / "out", "--split", SHARES, "--overwrite").stderr
    assert f"beside them: '{tmp_path}/out/test-'; a data set that an earlier split made" in said
    assert "beside them" not in _make(*QUICK, photos, tmp_path / "o2", "--split", SHARES, "--overwrite").stderr


def test_to_the_embedded_node_and_its_program_starts_it_again(photos: Path, tmp_path: Path) -> None:
    program = _make(*QUICK, photos, "ais://made", "--embedded-dir", tmp_path / "node").stdout
    assert run_program(program)[0] == "samples: 40, batches: 1"


@pytest.mark.parametrize("kind", ["pets", "photos"])
def test_sources_give_programs_of_their_masks_and_labels(kind: str, tmp_path: Path) -> None:
    """A batch has what the source has: photos, masks, labels. Photos alone are for training without labels."""
    if kind == "pets":
        source = write_pets(tmp_path / "pets", {f"beagle_{number}": 1 for number in range(9)})
        shapes: dict[str, tuple[int, ...]] = {"image": (9, 3, 350, 350), "mask": (9, 1, 350, 350), "label": (9,)}
    else:
        source = class_folders(tmp_path / "flat", {"": 9})
        crops = {"global": (2, 224), "local": (8, 96)}
        shapes = {f"{crop}_{n}": (9, 3, size, size) for crop, (number, size) in crops.items() for n in range(number)}
    found = _json(*QUICK, source, tmp_path / "out")
    assert found["source"]["kind"] == kind
    assert run_program(found["python"])[:2] == ["samples: 9, batches: 1", repr(shapes)]


def test_program_names_the_photo_of_several_and_the_pixels_that_pack_allowed(tmp_path: Path) -> None:
    """The name of the folder has a quote, a space and a backslash."""
    data = photo_bytes(1, 64, 48)
    (tmp_path / "a-0.tar").write_bytes(tar_bytes({"1.big.jpg": data, "1.small.jpg": data}))
    program = _make(*QUICK, tmp_path / "a-0.tar", tmp_path / 'o "u\\t', "--max-pixels", "100000000").stdout
    assert 'dp.multi_crop(photo="big.jpg")' in program
    assert ", bad_samples=dp.BadSamples(max_pixels=100000000))" in program
    assert run_program(program)[0] == "samples: 1, batches: 1"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["photos", "photos/out"], ValueError, r"DEST 'photos/out' lies in SOURCE 'photos'"),
        (["photos", "photos/x-"], ValueError, r"lies in SOURCE"),
        (["photos", "out", "--label", "a"], ValueError, r"is class folders: .*; --component, .* are for tables"),
        (["photos", "."], ValueError, r"is a data set with versions: it was changed"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    photos: Path, arguments: list[str], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    LocalStore(Path()).write(f"{version_start('shuffled-')}1.json", b"")
    files = sorted(photos.parent.rglob("*"))
    _make(*arguments, expect=error, match=message)
    assert sorted(photos.parent.rglob("*")) == files
