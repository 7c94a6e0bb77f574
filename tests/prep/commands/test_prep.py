"""The commands of ``prep`` in a row, their options and misuse; and those of ``prep pack`` that read tables and tars."""

import re
from pathlib import Path

import click
import pytest

from dali_pipes.commands.options import format_bytes, size
from dali_pipes.errors import DataError, StoreError
from tests.prep.commands.calls import json_of_prep, run_prep
from tests.prep.versions.sets import class_folders
from tests.shards import encode_photo, write_pets


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve photos in two classes."""
    return class_folders(tmp_path / "photos", {"cat": 6, "dog": 6})


def test_prep_without_endpoint_runs_an_embedded_node_each_time(photos: Path, tmp_path: Path) -> None:
    """A command finds the objects of the command before. One node serves the input and the output of a command."""
    options = ("--embedded-dir", tmp_path / "node")
    assert json_of_prep("pack", "imagefolder", photos, "ais://pets", *options)["num_written"] == 1
    assert json_of_prep("pack", "tars", "ais://pets", "ais://b", *options)["num_samples"] == 12


def test_prep_takes_the_endpoint_from_the_environment(photos: Path, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIS_ENDPOINT", node)
    assert json_of_prep("pack", "imagefolder", photos, "ais://from-environment")["num_samples"] == 12


def test_pack_pets_names_what_it_leaves_out_on_stderr(tmp_path: Path) -> None:
    write_pets(tmp_path / "pets", {"boxer_1": 9, "boxer_2": 9, "boxer_3": 9})
    (tmp_path / "pets" / "images" / "boxer_1.jpg").write_bytes(encode_photo("gif", mode="L"))
    (tmp_path / "pets" / "annotations" / "trimaps" / "boxer_2.png").unlink()
    arguments = ("pack", "pets", tmp_path / "pets", tmp_path / "out")
    run_prep(*arguments, expect=DataError, match=r"1 of 2 records .* are bad: boxer_1: image\.jpg holds a GIF")
    few = "2 of 3 records would be left out, more than --max"
    run_prep(*arguments, "--on-bad", "skip", expect=DataError, match=few)
    assert not (tmp_path / "out").exists()
    result = run_prep(*arguments, "--on-bad", "skip", "--max-bad", "2")
    first, second, *reasons = result.stderr.splitlines()
    assert [" ".join(reason.split()[:4]) for reason in reasons] == ["1 left out: no", "1 left out: image.jpg"]
    assert first == "skipped: boxer_2: no trimap"
    assert second.startswith("skipped: boxer_1: image.jpg holds a GIF, expected JPEG, PNG, WEBP, BMP or PNM")
    assert re.match(r"wrote 1 shard, 1 sample, 10\.0 KiB in .* \(left out 2\) -> ", result.stdout)
    (tmp_path / "pets" / "images" / "boxer_3.jpg").write_bytes(encode_photo("png"))
    found = json_of_prep(*arguments, "--on-bad", "keep", "--max-bad", "1", "--overwrite")
    assert found["noted"] == ["boxer_3: image.jpg is a PNG"]
    assert [text.partition(",")[0] for text in found["kept"]] == ["boxer_1: image.jpg holds a GIF"]
    assert found["classes"] == {"9": "boxer"}


def test_pack_pets_download_goes_through_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prep.sources.folders.download_pets", lambda directory: write_pets(directory, {"boxer_1": 9}))
    assert json_of_prep("pack", "pets", tmp_path / "new", tmp_path / "out", "--download")["num_samples"] == 1


def test_prep_without_an_endpoint_names_the_variable_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AIS_ENDPOINT was forgotten: the error does not name the port of an embedded node that nobody asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AIS_ENDPOINT", raising=False)
    monkeypatch.setenv("DALI_PIPES_EMBEDDED_DIR", str(tmp_path / "node"))
    match = r"no bucket 'ais://pets': AIS_ENDPOINT is not set, .*; set AIS_ENDPOINT, or make"
    run_prep("pack", "tars", "ais://pets/a-0.tar", "out", expect=StoreError, match=match)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "num_bytes", "shown"),
    [
        ("1023", 1023, "1023 B"),
        ("64kB", 64_000, "62.5 KiB"),
        ("1.5 MiB", 3 << 19, "1.5 MiB"),
        (" 6000TiB ", 6000 << 40, "6000.0 TiB"),
    ],
)
def test_sizes_have_binary_and_decimal_units(text: str, num_bytes: int, shown: str) -> None:
    assert (size(text), format_bytes(num_bytes)) == (num_bytes, shown)


@pytest.mark.parametrize("text", ["", "GiB", "1mib", "-1MB", "1e6", "0.4B"])
def test_size_of_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"a size (is a number and one of B, KiB|must be at least one byte)"):
        size(text)
