"""What `prep info` says of sets whose photos are known, and how headers are read."""

import io
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dali_pipes.formats.photo_header import read_whole_photo_header
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.urls import resolve_shards
from prep.inspect.info import Distribution, SetInfo, describe_set
from prep.photos.details import PhotoDetails, photo_details
from tests.prep.commands.calls import call_prep
from tests.shards import Sample, fill_bucket, image_bytes, make_samples, photo_bytes, write_classes, write_shards


def describe(shards: Path | str, **options: int) -> SetInfo:
    return describe_set(resolve_shards(shards, endpoint=None), **options)


call = partial(call_prep, "info")


def encoded(mode: str, kind: str, **options: object) -> bytes:
    return image_bytes(Image.new(mode, (40, 33)), kind, **options)


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return encoded("RGB", "JPEG", exif=exif.tobytes())


DETAILS = [
    (encoded("RGB", "JPEG", subsampling="4:2:2"), "JPEG baseline 3 8 4:2:2", True),
    (encoded("RGB", "JPEG", subsampling="4:4:4"), "JPEG baseline 3 8 4:4:4", True),
    (encoded("L", "JPEG"), "JPEG baseline 1 8 ", True),
    (encoded("CMYK", "JPEG"), "JPEG baseline 4 8 ", False),  # four channels
    (encoded("RGB", "JPEG", progressive=True), "JPEG progressive 3 8 4:2:0", False),
    (encoded("RGBA", "PNG"), "PNG  4 8 ", False),
    (encoded("P", "PNG"), "PNG  1 1 ", False),
    (encoded("I;16", "PNG"), "PNG  1 16 ", False),
]


@pytest.mark.parametrize(("data", "expected", "is_for_hardware"), DETAILS, ids=[row[1] for row in DETAILS])
def test_photo_details_of_what_pillow_writes(data: bytes, expected: str, is_for_hardware: bool) -> None:
    """Format, process, channels, bits and sampling; the same from the whole file and from its head."""
    details = photo_details(data)
    assert details is not None
    shown = f"{details.format} {details.process} {details.channels} {details.bits} {details.subsampling}"
    assert shown == expected
    assert (details.height, details.width) == (33, 40)
    assert details.is_for_hardware == is_for_hardware
    assert photo_details(data[: len(data) - 10]) == details


def test_details_of_damaged_heads_never_raise() -> None:
    draw = np.random.default_rng(0)
    for data in (oriented(6), encoded("RGB", "PNG"), encoded("RGB", "JPEG", progressive=True)) * 20:
        damaged = bytearray(data)
        for at in draw.integers(2, min(len(data), 400), 8).tolist():
            damaged[at] = int(draw.integers(0, 256))
        for stop in (len(damaged), *draw.integers(0, len(damaged), 5).tolist()):
            photo_details(bytes(damaged[:stop]))
            read_whole_photo_header(bytes(damaged[:stop]))


def test_details_of_every_head_are_right_or_ask_for_more() -> None:
    """Cut at any byte, a header gives what the whole file gives, or nothing."""
    data = oriented(6)
    whole = photo_details(data)
    answers = [photo_details(data[:stop]) for stop in range(3, len(data))]
    first = next(number for number, answer in enumerate(answers) if answer is not None)
    assert first > data.index(b"\xff\xc0")
    assert set(answers[first:]) == {whole}


def test_several_scans_are_not_for_hardware() -> None:
    """Baseline, 8 bits, three channels, and the engine takes one scan."""
    one = PhotoDetails("JPEG", 64, 64, 3, 8, "baseline", "4:4:0", 0, False, 3)
    assert one.is_for_hardware
    assert not one._replace(num_scan_channels=1).is_for_hardware
    assert not one._replace(subsampling="4:1:1").is_for_hardware
    assert not one._replace(bits=12).is_for_hardware


def test_info_of_a_known_set(tmp_path: Path) -> None:
    """Ten photos of two sizes, three classes, and a class of the table that nobody has."""
    samples = make_samples([(40, 30)] * 6 + [(100, 80)] * 4, num_classes=3)
    write_classes(tmp_path, {"1": "cat", "2": "dog", "3": "cow", "4": "pig"})
    write_shards(tmp_path, samples, per_shard=4)
    info = describe(tmp_path)
    assert (info.num_shards, info.num_samples, info.is_indexed) == (3, 10, True)
    assert info.components == {"cls": 10, "image.jpg": 10, "trimap.png": 10}
    assert info.component_bytes["image.jpg"] == sum(len(s.components["image.jpg"]) for s in samples)
    assert info.class_counts == {1: 4, 2: 3, 3: 3, 4: 0}
    photo, mask = info.photos["image.jpg"], info.photos["trimap.png"]
    assert (photo.is_mask, mask.is_mask) == (False, True)
    assert photo.height is not None
    assert (photo.height.least, photo.height.median, photo.height.greatest) == (30, 30, 80)
    assert photo.short_side is not None
    assert (photo.short_side.edges, photo.short_side.counts) == ([24, 32, 48, 64, 96], [6, 0, 0, 4])
    assert photo.kinds == {"JPEG baseline 4:2:0": 10}
    assert (photo.num_for_hardware, photo.num_headers) == (10, 10)
    assert mask.pixels is None


def test_classes_of_boxes_are_named_without_a_count(tmp_path: Path) -> None:
    write_classes(tmp_path, {"0": "cat", "1": "dog"})
    write_shards(tmp_path, [Sample("a", {"jpg": photo_bytes(1, 40, 33), "boxes.json": b"[]"})], per_shard=1)
    assert "2 classes, but no sample has a class id (boxes may have them): 'cat', 'dog'" in call(tmp_path).stdout


def test_pixels_are_those_of_numpy(tmp_path: Path) -> None:
    """Mean and deviation against a computation in floating point; each photo counts the same, whatever its size."""
    samples = make_samples([(40, 30), (120, 90), (64, 64)])
    write_shards(tmp_path, samples, per_shard=2)
    pixels = describe(tmp_path).photos["image.jpg"].pixels
    assert pixels is not None
    arrays = [np.asarray(Image.open(io.BytesIO(s.components["image.jpg"]))) / 255 for s in samples]
    mean = np.mean([array.mean(axis=(0, 1)) for array in arrays], axis=0)
    squares = np.mean([(array**2).mean(axis=(0, 1)) for array in arrays], axis=0)
    assert pixels.num_photos == 3
    np.testing.assert_allclose(pixels.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(pixels.std, np.sqrt(squares - mean**2), rtol=1e-9)


def test_kinds_of_photos_are_counted(tmp_path: Path) -> None:
    """What cannot be decoded is counted, not raised."""
    photos = [
        encoded("RGB", "JPEG", progressive=True),
        encoded("CMYK", "JPEG"),
        encoded("L", "JPEG"),
        oriented(6),
        encoded("RGBA", "PNG"),
        b"GIF89a" + bytes(20),
        photo_bytes(1, 40, 33)[:-2],
    ]
    write_shards(tmp_path, [Sample(f"a{i}", {"jpg": data}) for i, data in enumerate(photos)], per_shard=3)
    photo = describe(tmp_path).photos["jpg"]
    assert photo.formats == {"JPEG": 4, "PNG": 1, "GIF": 1, "JPEG cut off": 1}
    assert photo.kinds == {
        "JPEG baseline 4:2:0": 2,
        "JPEG progressive 4:2:0": 1,
        "JPEG baseline CMYK": 1,
        "JPEG baseline gray": 1,
        "PNG 8-bit RGBA": 1,
        "GIF": 1,
    }
    assert photo.num_for_hardware == 3
    assert photo.num_turned == 1
    assert photo.height is not None
    assert photo.height.greatest == 40  # upright
    assert "turned: 1 by their EXIF orientation; graphs give them upright" in call(tmp_path).stdout
    assert photo.pixels is not None
    assert (photo.pixels.num_photos, photo.pixels.num_undecodable) == (5, 2)


def test_info_of_a_bucket_reads_no_shard(
    bucket: AisStore, node: str, small_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifest, indexes and ranges of photos: a shard as a whole is never asked for."""
    fill_bucket(bucket, small_shards)
    monkeypatch.setattr(AisStore, "open", lambda _, name: pytest.fail(name))
    info = describe_set(resolve_shards(f"{bucket.url}/s-", endpoint=node))
    assert replace(info, url="") == replace(describe(small_shards), url="")


@pytest.mark.parametrize(
    ("values", "edges", "counts"),
    [
        ([0], [0, 1], [1]),
        ([0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 1, 1, 1]),
        ([64, 95, 96, 127], [64, 96, 128], [2, 2]),
        ([1, 1 << 20], [1 << power for power in range(22)], [1, *[0] * 19, 1]),  # too many bins for halves
    ],
)
def test_distribution_bins_hold_all(values: list[int], edges: list[int], counts: list[int]) -> None:
    """Powers of two and halves; the least and greatest are within."""
    found = Distribution.of(np.array(values))
    assert (found.edges, found.counts) == (edges, counts)
    assert (found.least, found.greatest, sum(found.counts)) == (min(values), max(values), len(values))


SHAPES = [(48, 80), (64, 64), (80, 48)]
SIZES = [(40 + 37 * row % 120, 40 + 53 * row % 120) for row in range(50)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [*make_samples(SIZES), Sample("x", {"cls": b"1", "image.jpg": b"no photo", "trimap.png": b"no mask"})]
    return write_shards(tmp_path_factory.mktemp("info") / "set", samples, per_shard=17)


def lost(size: tuple[int, int], shape: tuple[int, int]) -> float:
    ratio = size[1] / size[0] / (shape[0] / shape[1])
    return 1 - min(ratio, 1 / ratio)


def test_figures_are_those_of_a_loop(shards: Path) -> None:
    """The shares lost, the samples enlarged, and the ends of each bucket in one window."""
    few = ("--headers", "1", "--pixels", "0", "--batch-size", "8", "--json")
    found = json.loads(call(shards, "--buckets", "area=64*64,step=16,max_aspect=2", *few).stdout)["buckets"]
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
