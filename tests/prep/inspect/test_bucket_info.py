"""What `prep info` says of buckets, against what a loop over the photos says."""

import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prep.commands.group import prep
from tests.builders import Sample, make_samples, write_shards

SHAPES = [(48, 80), (64, 64), (80, 48)]
SIZES = [(40 + 37 * row % 120, 40 + 53 * row % 120) for row in range(50)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [*make_samples(SIZES), Sample("x", {"cls": b"1", "image.jpg": b"no photo", "trimap.png": b"no mask"})]
    return write_shards(tmp_path_factory.mktemp("info") / "set", samples, per_shard=17)


def call(shards: Path, *options: str) -> Result:
    few = ["--headers", "1", "--pixels", "0"]
    return CliRunner().invoke(prep, ["info", str(shards), *few, *options])


def lost(size: tuple[int, int], shape: tuple[int, int]) -> float:
    ratio = size[1] / size[0] / (shape[0] / shape[1])
    return 1 - min(ratio, 1 / ratio)


def test_figures_are_those_of_a_loop(shards: Path) -> None:
    """The shares lost, the samples enlarged, and the ends of each bucket in one window."""
    result = call(shards, "--buckets", "area=64*64,step=16,max_aspect=2", "--batch-size", "8", "--json")
    found = json.loads(result.stdout)["buckets"]
    nearest = [min(SHAPES, key=lambda shape: lost(size, shape)) for size in SIZES]
    counts = Counter(nearest) + Counter([(64, 64)])
    assert [(row["height"], row["width"], row["num_samples"]) for row in found["buckets"]] == [
        (*shape, counts[shape]) for shape in SHAPES
    ]
    shares = [lost(size, shape) for size, shape in zip(SIZES, nearest, strict=True)]
    assert found["lost"] == pytest.approx(sum(shares) / 51)
    assert found["lost_if_square"] == pytest.approx(sum(lost(size, (1, 1)) for size in SIZES) / 51)
    for row, shape in zip(found["buckets"], SHAPES, strict=True):
        small = [size for size, of in zip(SIZES, nearest, strict=True) if of == shape]
        assert row["num_enlarged"] == sum(size[1] < shape[0] or size[0] < shape[1] for size in small)
        assert row["num_left"] == counts[shape] % 8
        assert row["num_repeated"] == -counts[shape] % 8
    assert found["num_steps"] == sum(-(-num // 8) for num in counts.values())
    assert (found["photo"], found["num_unsized"], found["num_windows"]) == ("image.jpg", 1, 1)
    assert (found["window_bytes"], found["global_batch_size"]) == ("all", 8)


def test_windows_have_ends_of_their_own(shards: Path) -> None:
    """A window of one shard each: the ends are those of every shard; a set without buckets says nothing of them."""
    result = call(shards, "--buckets", "area=64*64,step=16", "--batch-size", "8", "--window-bytes", "1", "--json")
    found = json.loads(result.stdout)["buckets"]
    nearest = [min(SHAPES, key=lambda shape: lost(size, shape)) for size in SIZES] + [(64, 64)]
    windows = [Counter(nearest[first : first + 17]) for first in range(0, 51, 17)]
    assert found["num_windows"] == 3
    assert [row["num_left"] for row in found["buckets"]] == [
        sum(window[shape] % 8 for window in windows) for shape in SHAPES
    ]
    assert json.loads(call(shards, "--json").stdout)["buckets"] is None


def test_table_for_people(shards: Path) -> None:
    lines = call(shards, "--buckets", "area=64*64,step=16", "--batch-size", "8").stdout.splitlines()
    (head,) = (row for row, line in enumerate(lines) if line.startswith("image.jpg: 3 buckets, steps of 8, 1 window"))
    assert lines[head + 1].strip().startswith("cut off: ")
    assert "1 sample without a readable photo count" in lines[head + 2]
    assert " ".join(lines[head + 3].split()) == "shape samples cut off enlarged DROP leaves out FILL repeats"
    assert [line.split()[:3] for line in lines[head + 4 :]] == [["48", "x", "80"], ["64", "x", "64"], ["80", "x", "48"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("area=64,stp=2", "expected NAME=VALUE with one of area, step, max_aspect, photo, got 'stp=2'"),
        ("area", "expected NAME=VALUE with one of area, step, max_aspect, photo, got 'area'"),
        ("area=ab", "area must be a number, got 'ab'"),
        ("step=16", "area is missing; for instance area=256*256,step=32,max_aspect=2"),
        ("area=64", "area must be at least step * step, 1024 pixels, got 64; pass a smaller step"),
    ],
)
def test_description_that_is_none(shards: Path, text: str, expected: str) -> None:
    result = call(shards, "--buckets", text)
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.split())


def test_component_without_sizes(shards: Path) -> None:
    result = call(shards, "--buckets", "area=64*64,photo=cls")
    assert "expected heights and widths of 'cls'" in str(result.exception)
