"""TFRecord files: framing, checksums, tf.train.Example, and records that are damaged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from dali_pipes.errors import DataError
from dali_pipes.store.local import LocalStore
from prep.pack.pack import pack
from prep.sources.record import as_entry
from prep.sources.tfrecord_files import find_tfrecords, masked_crc32c
from prep.sources.tfrecords import tfrecords
from tests.fuzz.seeds.tfrecords import Feature, example, frame
from tests.sources import encode_photo


def _photo(number: int) -> dict[str, Feature]:
    return {
        "image/encoded": encode_photo("png" if number % 5 == 4 else "jpg", seed=number),
        "image/class/label": number % 3 + 1,
        "image/class/text": ["cat", "dog", "bird"][number % 3],
        "image/filename": f"n01/{number}.JPEG",
        "image/object/bbox/xmin": [0.5, float(number)],
        "image/ids": [-1, 2**40],
    }


def _write(path: Path, *frames: bytes) -> Path:
    path.write_bytes(b"".join(frames))
    return path


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", 0xA282EAD8), (b"123456789", 0xC78AB0E5), (bytes(32), 0x0FD7FFFA)],  # CRC32C's of RFC 3720, masked
)
def test_masked_crc32c_is_tensorflows(data: bytes, expected: int) -> None:
    crc = {b"": 0, b"123456789": 0xE3069283, bytes(32): 0x8A9136AA}[data]
    assert masked_crc32c(data) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == expected


@pytest.mark.parametrize("jobs", [1, 2])
def test_tfrecords_are_packed_with_their_bytes_labels_and_names(
    tmp_path: Path, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prep.sources.tfrecords.MIN_SHARED_BYTES", 0)
    features = [_photo(number) for number in range(12)]
    files = [
        _write(tmp_path / f"train.tfrecord-{part:05d}-of-00003", *(frame(example(f)) for f in features[part::3]))
        for part in range(3)
    ]
    source = tfrecords(files, jobs=jobs)
    assert source.classes == {1: "cat", 2: "dog", 3: "bird"}
    assert (list(source.broken), list(source.skipped)) == ([], [])
    report = pack(source, store=LocalStore(tmp_path / "out"))
    samples = list(webdataset.WebDataset(str(tmp_path / "out" / report.shards[0]), shardshuffle=False))
    ordered = [*features[0::3], *features[1::3], *features[2::3]]
    assert len(samples) == 12
    for number, (sample, expected) in enumerate(zip(samples, ordered, strict=True)):
        assert sample["__key__"] == f"train-tfrecord-{number // 4:05d}-of-00003/{number % 4:06d}"
        [name] = {"jpg", "png"} & set(sample)
        assert sample[name] == expected["image/encoded"]
        assert sample["cls"] == str(expected["image/class/label"]).encode()
    assert sum("png" in sample for sample in samples) == 2


@pytest.mark.parametrize("is_packed", [True, False])
def test_tfrecords_components_values_and_key_are_as_asked(tmp_path: Path, is_packed: bool) -> None:
    path = _write(tmp_path / "a.tfrecord", frame(example(_photo(1), is_packed=is_packed)))
    values = {"box.npy": "image/object/bbox/xmin", "ids.json": "image/ids", "name.txt": "image/class/text"}
    source = tfrecords(
        [path], components={"image.jpg": "image/encoded"}, values=values, key="image/filename", label="image/class/text"
    )
    [record] = source.records
    assert record.key == "n01/1"
    parts = dict(as_entry(record, source)[1])
    assert (parts["ids.json"], parts["name.txt"], parts["cls"]) == (b"[-1, 1099511627776]", b"dog", b"0")
    box = record.components["box.npy"]
    assert isinstance(box, np.ndarray)
    assert box.dtype == np.float32
    assert box.tolist() == [0.5, 1.0]
    assert source.classes == {0: "dog"}


def test_tfrecords_unlabelled_have_no_cls(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.tfrecord", frame(example({"image": encode_photo()})))
    [record] = tfrecords([path], has_labels=False).records
    assert (record.key, record.label, list(record.components)) == ("a/000000", None, ["jpg"])


def _damage(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


GOOD = frame(example(_photo(0)))
LAST = frame(example(_photo(1)))


@pytest.mark.parametrize(
    ("middle", "problem", "num_left"),
    [
        (_damage(GOOD, 40), "its data have the checksum [0-9a-f]{8}, the file says [0-9a-f]{8}", 2),
        (_damage(GOOD, len(GOOD) - 1), "its data have the checksum", 2),
        (
            _damage(GOOD, 0),
            r"its length has the checksum .*; this and the rest of the file, \d+ bytes, cannot be read",
            1,
        ),
        (_damage(GOOD, 9), "its length has the checksum", 1),
        (GOOD[:-700], "its data have the checksum", 1),  # and then it is out of step
        (frame(b"no Example"), "is not a tf.train.Example: ", 2),
        (frame(b""), "is not a tf.train.Example, or has no features", 2),
        (frame(example({"image": encode_photo()})), r"no feature image/class/label or label or .*--label FEATURE", 2),
        (frame(example({"label": 1})), r"no feature image/encoded or image or .* \(found: label\)", 2),
        (frame(example({"image": 3, "label": 1})), "feature 'image' holds 1 values, expected one of bytes", 2),
        (frame(example({"image": [b"a", b"b"], "label": 1})), "feature 'image' holds 2 values", 2),
        (
            frame(example({"image": b"a", "label": [1, 2]})),
            r"feature 'label' holds \[1, 2\], expected one integer",
            2,
        ),
        (frame(example({"image": b"a", "label": 1.5})), r"feature 'label' holds \[1\.5\]", 2),
    ],
)
def test_tfrecords_damaged_record_is_named_by_file_and_byte(
    tmp_path: Path, middle: bytes, problem: str, num_left: int
) -> None:
    """Nothing is packed of the set, unless it is asked to leave such out."""
    path = _write(tmp_path / "a.tfrecord", GOOD, middle, LAST)
    source = tfrecords([path])
    assert len(source.records) == num_left
    with pytest.raises(DataError, match=rf"cannot be read: '{path}', record 1 at byte {len(GOOD)}: .*--on-bad skip"):
        pack(source, store=LocalStore(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    report = pack(source, store=LocalStore(tmp_path / "out"), on_bad="skip")
    assert report.num_samples == num_left
    found = [line for line in report.skipped if line.startswith(f"'{path}', record 1 at byte {len(GOOD)}: ")]
    assert len(found) == 1
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(found[0])


@pytest.mark.parametrize(
    ("cut", "problem"),
    [
        (5, "the file ends after 5 of its first 12 bytes"),
        (100, r"it claims bytes \d+ to \d+, the file has \d+: it was cut"),
    ],
)
def test_tfrecords_file_that_was_cut_off_is_named(tmp_path: Path, cut: int, problem: str) -> None:
    path = _write(tmp_path / "a.tfrecord", GOOD, LAST[:cut])
    source = tfrecords([path])
    assert len(source.records) == 1
    with pytest.raises(DataError, match=rf"record 1 at byte {len(GOOD)}: {problem}"):
        pack(source, store=LocalStore(tmp_path / "out"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no record can be packed: the files are empty"),
        (b"\x1f\x8b" + bytes(50), "is compressed, expected a plain TFRecord file; gunzip it"),
        (
            b"not a TFRecord file, by far",
            "no record can be packed: '.*', record 0 at byte 0: its length has the checksum",
        ),
        (frame(b"x"), "no record can be packed: .*is not a tf.train.Example"),
    ],
)
def test_tfrecords_file_that_is_none_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        tfrecords([_write(tmp_path / "a.tfrecord", content)])


def test_tfrecords_labels_that_disagree_are_an_error(tmp_path: Path) -> None:
    def write(**labels: Any) -> Path:
        frames = [
            frame(example({"image": encode_photo(), "label": one, "label/text": two})) for one, two in labels.values()
        ]
        return _write(tmp_path / "a.tfrecord", *frames)

    with pytest.raises(DataError, match="class id 1 is 'cat' and, at 'a/000001', 'dog'"):
        tfrecords([write(a=(1, "cat"), b=(1, "dog"))])
    with pytest.raises(DataError, match=r"labels are names and integers, 1 at 'a/00000\d'"):
        tfrecords([write(a=(1, "cat"), b=("dog", "dog"))])


def test_find_tfrecords_takes_files_and_directories(tmp_path: Path) -> None:
    for name in ("b.tfrecord", "a.tfrecord-00000-of-00001", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "tfrecords-0.idx").write_text("0 10\n")
    assert find_tfrecords([tmp_path]) == [tmp_path / "a.tfrecord-00000-of-00001", tmp_path / "b.tfrecord"]
    assert find_tfrecords([tmp_path / "notes.txt"]) == [tmp_path / "notes.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty' holds no file with 'tfrecord' in its name"):
        find_tfrecords([tmp_path / "empty"])
    with pytest.raises(DataError, match=r"no such file or directory: '.*/nope'"):
        find_tfrecords([tmp_path / "nope"])


def test_tfrecords_files_of_one_name_in_two_folders_have_keys_apart(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        _write(tmp_path / folder / "a.tfrecord", GOOD)
    source = tfrecords([tmp_path / "x" / "a.tfrecord", tmp_path / "y" / "a.tfrecord"])
    assert [record.key for record in source.records] == ["x-a/000000", "y-a/000000"]
