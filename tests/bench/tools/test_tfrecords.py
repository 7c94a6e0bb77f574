"""TFRecord files of shards: what is in them, read anew from the format's definition, and by DALI's own tool."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from bench.loaders.peers.dali_readers import RecordFiles, masked_crc32c, record_index, write_tfrecords
from bench.loaders.protocol import LoaderOptions
from dali_pipes.errors import DataError
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from tests.bench.conftest import NUM_SAMPLES, NUM_SHARDS, samples
from tests.builders import Sample, write_tar


@pytest.fixture
def written(shards: ShardSet, tmp_path: Path) -> RecordFiles:
    return write_tfrecords(shards, tmp_path, options=LoaderOptions())


def examples_of(data: bytes) -> list[dict[str, list[object]]]:
    """The records of a file, read anew from the definition of the format: every checksum is looked at."""
    found, at = [], 0
    while at < len(data):
        length, length_crc = struct.unpack_from("<QI", data, at)
        assert masked_crc32c(data[at : at + 8]) == length_crc
        record = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 12 + length) == (masked_crc32c(record),)
        [(_, features)] = fields_of(record)
        found.append(dict(feature_of(entry) for _, entry in fields_of(features)))
        at += 16 + length
    return found


def feature_of(entry: bytes) -> tuple[str, list[object]]:
    """A name and its values: bytes, or integers of 64 bits."""
    (_, name), (_, feature) = fields_of(entry)
    [(kind, values)] = fields_of(feature)
    if kind == 1:
        return name.decode(), [value for _, value in fields_of(values)]
    assert kind == 3
    [(_, packed)] = fields_of(values)
    value, _ = varint_at(packed, 0)
    return name.decode(), [value - (1 << 64) if value >> 63 else value]


def fields_of(data: bytes) -> list[tuple[int, bytes]]:
    """Number and content of each field of a protocol buffer; all of them are of bytes."""
    found, at = [], 0
    while at < len(data):
        tag, at = varint_at(data, at)
        assert tag & 7 == 2
        size, at = varint_at(data, at)
        found.append((tag >> 3, data[at : at + size]))
        at += size
    return found


def varint_at(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if not data[at - 1] & 128:
            return value, at


def test_records_have_photo_mask_label_and_key(written: RecordFiles) -> None:
    """One file a shard, records in the samples' order; all bytes are the members'."""
    assert [path.name for path in written.paths] == [f"samples-{number:06d}.tfrecord" for number in range(NUM_SHARDS)]
    assert written.num_samples == NUM_SAMPLES
    for number, path in enumerate(written.paths):
        assert examples_of(path.read_bytes()) == [
            {
                "image/encoded": [sample.components["image.jpg"]],
                "image/filename": [sample.key.encode()],
                "image/class/label": [int(sample.components["cls"])],
                "trimap.png": [sample.components["trimap.png"]],
            }
            for sample in samples()[number::NUM_SHARDS]
        ]


def test_index_is_that_of_dalis_tfrecord2idx(written: RecordFiles, tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "tfrecord2idx"
    if not program.is_file():
        pytest.skip("no tfrecord2idx beside the interpreter: DALI is not installed")
    for path, index_path in zip(written.paths, written.index_paths, strict=True):
        command = [sys.executable, str(program), str(path), str(tmp_path / "theirs.idx")]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        assert index_path.read_bytes() == (tmp_path / "theirs.idx").read_bytes()


def test_record_index_counts_from_the_files_start() -> None:
    assert record_index([]) == ""
    assert record_index([20, 17, 3]) == "0 20\n20 17\n37 3\n"


def test_labels_are_64_bits_with_a_sign_and_a_sample_without_a_mask_is_named(tmp_path: Path) -> None:
    for folder in ("in", "out"):
        (tmp_path / folder).mkdir()
    rows = [Sample(f"{label}", {"image.jpg": b"photo", "cls": str(label).encode()}) for label in (-2, 300, 1 << 40)]
    write_tar(tmp_path / "in" / "s-000000.tar", rows)
    found = resolve_shards(tmp_path / "in", endpoint=None)
    (path,) = write_tfrecords(found, tmp_path / "out", options=LoaderOptions(recipe="classification", mask=None)).paths
    assert [one["image/class/label"] for one in examples_of(path.read_bytes())] == [[-2], [300], [1 << 40]]
    with pytest.raises(
        DataError, match=r"s-000000.tar', key '-2': no component 'trimap.png' \(found: cls, image.jpg\)"
    ):
        write_tfrecords(found, tmp_path / "out", options=LoaderOptions())
