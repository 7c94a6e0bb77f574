"""``prep make``: from every kind of source to data sets that load, in one go, in parts, and again."""

import contextlib
import io
import json
import tarfile
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from dali_pipes.errors import DataError, StoreError
from tests.docs.pages import run_python
from tests.prep.commands.calls import json_of_prep, run_prep
from tests.prep.versions.sets import class_folders
from tests.shards import photo_bytes, tar_bytes, write_pets

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
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.iterdir())}


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
    printed = run_python("-c", done.stdout, folder=tmp_path).splitlines()
    numbers = [int(line.split()[0]) for line in printed if "samples" in line]
    assert sum(numbers) == 40
    assert printed[1] == repr({"image": (numbers[0], 3, 224, 224), "label": (numbers[0],)})
    assert printed[3] == repr({"image": (numbers[1], 3, 224, 224), "label": (numbers[1],)})


@pytest.mark.parametrize(
    "lost",
    [
        [],
        ["val-000000.tar", "train-manifest.safetensors"],
        ["samples-000000.tar", "train-000000.tar", "train-000000.index.safetensors"],
        ["samples-classes.json", "val-columns.safetensors", "val-manifest.safetensors"],
    ],
)
def test_run_again_writes_only_what_is_lacking(photos: Path, tmp_path: Path, lost: list[str]) -> None:
    """With the same bytes. If nothing is lacking, nothing is touched, and it says so."""
    out = tmp_path / "out"
    first = _json(*QUICK, photos, out, "--split", SHARES)
    made = _bytes_of(out)
    for name in lost:
        (out / name).unlink()
    again = _make(*QUICK, photos, out, "--split", SHARES)
    assert again.stdout == first["python"]
    after = _bytes_of(out)
    assert {name: data for name, (data, _) in after.items()} == {name: data for name, (data, _) in made.items()}
    if not lost:
        assert after == made
        assert again.stderr.count("there already") == 4  # pack, shuffle, and the indexes of both splits


def test_changed_source_is_an_error_until_overwrite_is_asked_for(photos: Path, tmp_path: Path) -> None:
    _make(*QUICK, photos, tmp_path / "out")
    class_folders(photos.parent / "more", {"cat": 1}, first=40)
    (photos.parent / "more" / "cat" / "040.jpg").rename(photos / "cat" / "040.jpg")
    _make(*QUICK, photos, tmp_path / "out", expect=StoreError, match="holds shards with other content: .*--overwrite")
    found = _json(*QUICK, photos, tmp_path / "out", "--overwrite")
    assert [made["num_samples"] for made in found["sets"]] == [41]
    assert found["sets"][0]["was_indexed"] is False


def test_split_that_is_not_trained_on_gets_a_graph_for_it(tmp_path: Path) -> None:
    """Whatever its folder is called: COCO's have a year."""
    for name in ("Train2017/1.jpg", "Val2017/1.jpg"):
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        (tmp_path / "in" / name).write_bytes(photo_bytes(1, 64, 48))
    program = _make(*QUICK, tmp_path / "in", tmp_path / "out").stdout
    assert '/Train2017-", dp.classification_train(), batch_size=1, seed=0)' in program
    assert '/Val2017-", dp.classification_eval(), batch_size=1, seed=0, last_batch_policy="PARTIAL")' in program
    options = (tmp_path / "in", tmp_path / "o2", "--split", SHARES)
    _make(*QUICK, *options, expect=ValueError, match="has the splits Train2017, Val2017")


def test_overwriting_names_the_data_sets_of_an_earlier_split(photos: Path, tmp_path: Path) -> None:
    """Its samples would be trained on and tested with."""
    _make(*QUICK, photos, tmp_path / "out", "--split", "train=0.6,val=0.2,test=0.2")
    said = _make(*QUICK, photos, tmp_path / "out", "--split", SHARES, "--overwrite").stderr
    assert f"beside them: '{tmp_path}/out/test-'; a data set that an earlier split made" in said
    assert "beside them" not in _make(*QUICK, photos, tmp_path / "o2", "--split", SHARES, "--overwrite").stderr


def test_data_set_with_versions_is_refused_before_anything_is_written(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _make(*QUICK, photos, out, "--split", SHARES)
    with tarfile.open(out / "val-000000.tar") as tar:
        key = tar.getnames()[0].rpartition(".")[0]
    run_prep("remove", f"{out}/val-", "--key", key)
    (photos / "dog" / "new.jpg").write_bytes(photo_bytes(99, 64, 48))
    before = _bytes_of(out)
    match = "out/val-' is a data set with versions: .*make into another DEST, or delete the data set first$"
    for options in ((), ("--overwrite",)):
        _make(*QUICK, photos, out, "--split", SHARES, *options, expect=ValueError, match=match)
    assert _bytes_of(out) == before


def test_dry_run_tells_the_plan_and_writes_nothing(photos: Path, tmp_path: Path) -> None:
    planned = _make(photos, tmp_path / "out", "--split", SHARES, "--dry-run")
    assert not (tmp_path / "out").exists()
    assert planned.stdout == ""
    assert "pack: would write 1 shard, 40 samples" in planned.stderr
    for split in ("train", "val"):
        assert f"would write {tmp_path}/out/{split}-...\n" in planned.stderr


def test_splits_in_a_bucket_are_made_by_the_cluster(photos: Path, node: str) -> None:
    """dSort gets the map of the splits; the program finds the cluster; run again, nothing is written."""
    arguments = (*QUICK, photos, "ais://made-splits", "--split", SHARES, "--endpoint", node)
    found = _json(*arguments)
    assert found["shuffle"]["engine"] == "dsort"
    assert [made["url"] for made in found["sets"]] == ["ais://made-splits/train-", "ais://made-splits/val-"]
    assert sum(made["num_samples"] for made in found["sets"]) == 40
    assert sum(int(line.split()[0]) for line in run_program(found["python"]) if "samples" in line) == 40
    again = _json(*arguments)
    assert (again["pack"]["num_written"], again["shuffle"]["num_written"]) == (0, 0)
    assert all(made["was_indexed"] for made in again["sets"])


def test_to_the_embedded_node_and_its_program_starts_it_again(photos: Path, tmp_path: Path) -> None:
    program = _make(*QUICK, photos, "ais://made", "--embedded-dir", tmp_path / "node").stdout
    assert run_program(program)[0] == "40 samples, 1 batches"


def _write_hf(folder: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"image": {"bytes": photo_bytes(number, 64, 48), "path": None}, "label": number % 2, "text": f"photo {number}"}
        for number in range(9)
    ]
    names = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    folder.mkdir()
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata({"huggingface": json.dumps(names)})
    parquet.write_table(table, folder / "train-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("kind", ["pets", "photos", "hf"])
def test_sources_give_programs_of_their_masks_and_labels(kind: str, tmp_path: Path) -> None:
    """A batch has what the source has: photos, masks, labels."""
    shapes: dict[str, tuple[int, ...]] = {"image": (9, 3, 224, 224), "label": (9,)}
    if kind == "pets":
        source = write_pets(tmp_path / "pets", {f"beagle_{number}": 1 for number in range(9)})
        shapes = {"image": (9, 3, 350, 350), "mask": (9, 1, 350, 350), "label": (9,)}
    elif kind == "photos":
        source = class_folders(tmp_path / "flat", {"": 9})
        del shapes["label"]
    else:
        source = _write_hf(tmp_path / "hf")
    found = _json(*QUICK, source, tmp_path / "out")
    assert found["source"]["kind"] == kind
    assert run_program(found["python"])[:2] == ["9 samples, 1 batches", repr(shapes)]


def test_options_of_tables_pass_through(tmp_path: Path) -> None:
    source = _write_hf(tmp_path / "hf")
    said = _make(*QUICK, source, tmp_path / "out").stderr
    assert "columns not packed: text; to take one: --component NAME=COLUMN" in said
    found = _json(*QUICK, source, tmp_path / "with", "--component", "text.txt=text", "--unlabelled")
    assert found["pack"]["unused"] == ["label"]
    assert run_program(found["python"])[1] == repr({"image": (9, 3, 224, 224)})
    with tarfile.open(tmp_path / "with" / "shuffled-000000.tar") as archive:
        assert {name.partition(".")[2] for name in archive.getnames()} == {"jpg", "text.txt"}


@pytest.mark.parametrize(
    ("options", "call"),
    [
        (["--no-masks"], "dp.classification_train(), "),
        ([], "dp.segmentation(), "),
        (["--mask", "depth.png"], 'dp.segmentation(mask="depth.png"), '),
    ],
)
def test_program_has_the_masks_that_were_named(tmp_path: Path, options: list[str], call: str) -> None:
    """A PNG beside a JPEG is a mask only if the user does not say otherwise."""
    Image.new("L", (64, 48), 3).save(tmp_path / "a.png")
    (tmp_path / "a.jpg").write_bytes(photo_bytes(1, 64, 48))
    (tmp_path / "list.csv").write_text("path,label,depth\na.jpg,cat,a.png\n")
    columns = ("--component", "image=path", "--component", "depth=depth")
    program = _make(*QUICK, tmp_path / "list.csv", tmp_path / "out", *columns, *options).stdout
    assert call in program
    assert run_program(program)[0] == "1 samples, 1 batches"


def test_bad_data_end_with_1(photos: Path, tmp_path: Path) -> None:
    cut = photos / "cat" / "002.jpg"
    cut.write_bytes(cut.read_bytes()[:-30])
    _make(photos, tmp_path / "out", expect=DataError, match=r"1 of 40 records .* cat/002: jpg is cut off")
    assert _json(*QUICK, photos, tmp_path / "skip", "--on-bad", "skip")["sets"][0]["num_samples"] == 39
    few = _make(photos, tmp_path / "keep", "--on-bad", "keep")
    assert "bad photos or samples: 1; --max-bad allows them, so the exit code is 0" in few.stderr
    assert "1 problem, 1 bad sample" in few.stderr
    assert f"prep verify {tmp_path}/keep/shuffled- --quarantine bad.tsv" in few.stderr
    done = _make(photos, tmp_path / "keep", "--on-bad", "keep", "--max-bad", "0", expect=SystemExit, match="1")
    assert done.exit_code == 1
    assert "1 problem, 1 bad sample" in done.stderr


def test_program_names_the_photo_of_several_and_the_pixels_that_pack_allowed(tmp_path: Path) -> None:
    """Whatever characters a folder's name has."""
    data = photo_bytes(1, 64, 48)
    (tmp_path / "a-0.tar").write_bytes(tar_bytes({"1.big.jpg": data, "1.small.jpg": data}))
    program = _make(*QUICK, tmp_path / "a-0.tar", tmp_path / 'o "u\\t', "--max-pixels", "100000000").stdout
    assert 'dp.classification_train(photo="big.jpg")' in program
    assert ", bad_samples=dp.BadSamples(max_pixels=100000000))" in program
    assert run_program(program)[0] == "1 samples, 1 batches"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["photos", "photos/out"], ValueError, r"DEST 'photos/out' lies in SOURCE 'photos'"),
        (["photos", "photos/x-"], ValueError, r"lies in SOURCE"),
        (["photos", "out", "--label", "a"], ValueError, r"is class folders: .*; --component, .* are for tables"),
        (["photos", "out", "--split", "train=0.9"], ValueError, r"shares must be positive and sum up to 1"),
        (["nothing", "out"], DataError, r"no such file or directory: 'nothing'"),
        (["photos", "out", "--split", "samples=0.5,b=0.5"], ValueError, r"a split cannot be called 'samples'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    photos: Path, arguments: list[str], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    files = sorted(photos.parent.rglob("*"))
    _make(*arguments, expect=error, match=message)
    assert sorted(photos.parent.rglob("*")) == files
