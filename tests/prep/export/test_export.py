"""Shards to TFRecord files: what is in them, that they can be read back, that a run can be repeated, errors."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.tar_reader import ArchiveReader
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.commands.group import prep
from prep.export.export import ExportReport, export_tfrecords, record_index
from prep.index import index_shards
from prep.pack.pack import open_target, pack
from prep.sources.tfrecord_files import find_features, masked_crc32c, values_of
from prep.sources.tfrecords import tfrecords
from tests.conftest import Sample, make_samples, photo_bytes, write_shards, write_tar
from tests.sources import encode_photo, start_python

CLASSES = {1: "Abyssinian", 2: "beagle", 3: "Bombay", 4: "boxer", 5: "Bengal ä"}
COMPONENTS = {"image.jpg": "image/encoded", "trimap.png": "trimap.png"}

Contents = dict[str, dict[str, bytes]]


def _examples(data: bytes) -> list[dict[str, list[object]]]:
    """The records of a file, read anew from the definition of the format: every checksum is looked at."""
    found, at = [], 0
    while at < len(data):
        length, length_crc = struct.unpack_from("<QI", data, at)
        assert masked_crc32c(data[at : at + 8]) == length_crc
        record = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 12 + length) == (masked_crc32c(record),)
        features = find_features(record)
        found.append({name: values_of(features, record, name) for name in features})
        at += 16 + length
    return found


def _contents(shards: ShardSet) -> Contents:
    """Key -> component -> bytes, in the shards' order."""
    found: Contents = {}
    for name in shards.names:
        with shards.store.open(name) as stream:
            for member in ArchiveReader(stream, shard=name):
                found.setdefault(member.key, {})[member.component] = member.read()
    return found


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples([(40 + 7 * (i % 5), 33 + 5 * (i % 7)) for i in range(23)])


@pytest.fixture
def shards(tmp_path: Path, samples: list[Sample]) -> ShardSet:
    """23 samples in four shards of 6, 6, 6, 5, with a class table."""
    folder = write_shards(tmp_path / "in", samples, per_shard=6, index=False)
    found = resolve_shards(folder, endpoint=None)
    index_shards(found, classes=CLASSES)
    return found


def _export(shards: ShardSet, folder: Path, **options: object) -> ExportReport:
    return export_tfrecords(shards, store=LocalStore(folder), prefix="samples-", **options)  # type: ignore[arg-type]


def test_export_writes_the_usual_features_of_each_sample(
    shards: ShardSet, samples: list[Sample], tmp_path: Path
) -> None:
    """One file a shard, records in the samples' order; all bytes are the members'."""
    report = _export(shards, tmp_path / "out")
    assert report.files == tuple(f"samples-{number:06d}.tfrecord" for number in range(4))
    assert (report.num_written, report.num_samples) == (4, 23)
    found = [_examples((tmp_path / "out" / name).read_bytes()) for name in report.files]
    assert [len(examples) for examples in found] == [6, 6, 6, 5]
    for number, (sample, example) in enumerate(zip(samples, [row for rows in found for row in rows], strict=True)):
        label = int(sample.components["cls"])
        assert example == {
            "image/encoded": [sample.components["image.jpg"]],
            "image/format": [b"JPEG"],
            "image/height": [33 + 5 * (number % 7)],
            "image/width": [40 + 7 * (number % 5)],
            "image/class/label": [label],
            "image/class/text": [CLASSES[label].encode()],
            "image/filename": [sample.key.encode()],
            "trimap.png": [sample.components["trimap.png"]],
        }
    assert set(report.features) == set(example)
    assert report.num_bytes == sum((tmp_path / "out" / name).stat().st_size for name in report.files)


def test_export_index_is_that_of_dalis_tfrecord2idx(shards: ShardSet, tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "tfrecord2idx"
    if not program.is_file():
        pytest.skip("no tfrecord2idx beside the interpreter: DALI is not installed")
    for name in _export(shards, tmp_path / "out").files:
        path = tmp_path / "out" / name
        command = [sys.executable, str(program), str(path), str(tmp_path / "theirs.idx")]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        assert path.with_suffix(".idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


@pytest.mark.parametrize("max_bytes", [None, 1, 20_000, 1 << 30])
def test_export_round_trip_keeps_keys_bytes_and_labels(shards: ShardSet, tmp_path: Path, max_bytes: int | None) -> None:
    """`prep pack tfrecords` of what was exported has the samples of the shards, in their order."""
    report = _export(shards, tmp_path / "out", max_bytes=max_bytes)
    files = [tmp_path / "out" / name for name in report.files]
    source = tfrecords(files, components=COMPONENTS, key="image/filename")
    assert (list(source.broken), dict(source.classes)) == ([], CLASSES)
    pack(source, store=LocalStore(tmp_path / "back"))
    before, after = _contents(shards), _contents(resolve_shards(tmp_path / "back", endpoint=None))
    assert after == before
    assert list(after) == list(before)
    assert sum(path.with_suffix(".idx").read_text().count("\n") for path in files) == 23


@pytest.mark.parametrize(
    ("max_bytes", "num_files"),
    [(None, 4), (1, 23), (1 << 30, 1)],  # a shard each; a record is not cut; all in one, across the shards
)
def test_export_max_bytes_bounds_files(shards: ShardSet, tmp_path: Path, max_bytes: int | None, num_files: int) -> None:
    assert len(_export(shards, tmp_path / "out", max_bytes=max_bytes).files) == num_files


def test_export_max_bytes_fills_files(shards: ShardSet, tmp_path: Path) -> None:
    """None is larger than asked for, and none could have taken the next one's first record."""
    report = _export(shards, tmp_path / "out", max_bytes=6_000)
    sizes = [(tmp_path / "out" / name).stat().st_size for name in report.files]
    first = [int((tmp_path / "out" / name).with_suffix(".idx").read_text().split()[1]) for name in report.files]
    assert len(sizes) > 4
    assert max(sizes) <= 6_000
    assert all(size + following > 6_000 for size, following in zip(sizes, first[1:], strict=False))


@pytest.mark.parametrize("jobs", [1, 3])
def test_export_from_and_to_a_bucket_gives_the_same_files(
    shards: ShardSet, tmp_path: Path, bucket: AisStore, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prep.export.export.MIN_SHARED_BYTES", 0)
    report = _export(shards, tmp_path / "out", jobs=jobs)
    bucket.create()
    for path in Path(shards.store.url).iterdir():
        bucket.upload(path.name, path)
    remote = resolve_shards(f"{bucket.url}/s-", endpoint=bucket.endpoint)
    store, prefix = open_target(f"{bucket.url}/out", endpoint=bucket.endpoint)
    exported = export_tfrecords(remote, store=store, prefix=prefix, jobs=jobs)
    for name in report.files:
        for written in (name, name.replace(".tfrecord", ".idx")):
            assert store.read(f"out/{written}") == (tmp_path / "out" / written).read_bytes()
    assert exported.num_written == 4
    assert export_tfrecords(remote, store=store, prefix=prefix, jobs=jobs).num_written == 0


def test_export_again_writes_what_is_missing_alone(shards: ShardSet, tmp_path: Path) -> None:
    report = _export(shards, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert len(before) == 8
    (tmp_path / "out" / report.files[1]).unlink()
    (tmp_path / "out" / "samples-000003.idx").unlink()
    assert _export(shards, tmp_path / "out").num_written == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_export_over_other_files_is_refused_unless_asked_for(shards: ShardSet, tmp_path: Path) -> None:
    """Of another size, of the same size, and beyond the last one; nothing is written where it is refused."""
    out = tmp_path / "out"
    _export(shards, out)
    path = out / "samples-000002.tfrecord"
    good = path.read_bytes()
    before = {entry.name for entry in out.iterdir()}
    for data, message in [
        (good + b"x", r"out/samples-' holds files of another export: 'samples-000002.tfrecord'; --overwrite"),
        (good[:-1] + bytes([good[-1] ^ 1]), "samples-000002.tfrecord' is there with other content; --overwrite"),
    ]:
        path.write_bytes(data)
        with pytest.raises(StoreError, match=message):
            _export(shards, out)
        assert path.read_bytes() == data
        assert _export(shards, out, overwrite=True).num_written == 1
        assert path.read_bytes() == good
    for name in ("samples-000004.tfrecord", "samples-000007.idx"):
        (out / name).write_bytes(b"other")
    with pytest.raises(StoreError, match=r"of another export: 'samples-000004.tfrecord', 'samples-000007.idx'; "):
        _export(shards, out)
    assert _export(shards, out, overwrite=True).num_written == 0
    assert {entry.name for entry in out.iterdir()} == before


def test_export_features_are_named_as_asked(shards: ShardSet, tmp_path: Path, samples: list[Sample]) -> None:
    report = _export(shards, tmp_path / "out", features={"image/segmentation/class/encoded": "trimap.png"})
    [first, *_] = _examples((tmp_path / "out" / report.files[0]).read_bytes())
    assert first["image/segmentation/class/encoded"] == [samples[0].components["trimap.png"]]
    assert "trimap.png" not in report.features


def test_export_photo_is_the_first_that_a_sample_has(tmp_path: Path) -> None:
    """An image folder's photos have one extension each; what nobody could read is written without a size."""
    png = encode_photo("png", size=(30, 20))
    rows = [
        Sample("a/0", {"jpg": photo_bytes(0, 12, 10), "txt": b"a text", "cls": b"-2"}),
        Sample("a/1", {"png": png, "cls": b"300"}),
        Sample("a/2", {"jpg": b"\xff\xd8\xff no more", "npy": b""}),
    ]
    write_tar(tmp_path / "s-000000.tar", rows)
    shards = resolve_shards(tmp_path, endpoint=None)
    index_shards(shards)
    report = _export(shards, tmp_path / "out", photo="jpg;png")
    first, second, third = _examples((tmp_path / "out" / report.files[0]).read_bytes())
    assert (first["txt"], first["image/class/label"]) == ([b"a text"], [-2])
    assert (second["image/encoded"], second["image/format"]) == ([png], [b"PNG"])
    assert (second["image/height"], second["image/width"], second["image/class/label"]) == ([20], [30], [300])
    assert set(third) == {"image/encoded", "image/filename", "image/format", "npy"}
    assert third["npy"] == [b""]


def _without_manifest(shards: ShardSet) -> None:
    Path(shards.store.locate("s-manifest.safetensors")).unlink()


def _longer(shards: ShardSet) -> None:
    with Path(shards.store.locate(shards.names[1])).open("ab") as stream:
        stream.write(bytes(512))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_manifest, r"no manifest '.*s-manifest.safetensors': the shards are not indexed; .* prep index .*/s-"),
        (
            _longer,
            r"s-000001.tar' has \d+ bytes, its manifest says \d+: it was written again; index it: dali-pipes prep",
        ),
        (
            lambda shards: Path(shards.store.locate("s-000002.index.safetensors")).write_bytes(b"?"),
            "s-000002.index.safetensors' is not the index that the manifest was made with",
        ),
    ],
)
def test_export_of_shards_that_are_not_as_indexed_is_refused(
    shards: ShardSet, tmp_path: Path, damage: object, message: str
) -> None:
    damage(shards)  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        _export(shards, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"photo": "jpg"}, DataError, r"feature 'image/encoded': no component 'jpg' in '.*' \(found: cls, image.jpg, "),
        ({"features": {"mask": "seg.png"}}, DataError, r"feature 'mask': no component 'seg.png' in .*trimap.png\)"),
        ({"features": {"image/encoded": "cls"}}, ValueError, "feature 'image/encoded' already has a meaning"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be positive, got 0"),
        ({"jobs": 0}, ValueError, "jobs must be positive, got 0"),
        ({"prefix": "a/1"}, ValueError, "prefix must end in a name's start that is not a digit, .*got 'a/1'"),
    ],
)
def test_export_options_that_cannot_be_are_refused(
    shards: ShardSet, tmp_path: Path, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        export_tfrecords(shards, **{"store": LocalStore(tmp_path / "out"), "prefix": "samples-", **options})  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_export_sample_without_photo_is_named_before_anything_is_written(tmp_path: Path, samples: list[Sample]) -> None:
    lacking = Sample("odd/one", {"cls": b"1", "trimap.png": samples[0].components["trimap.png"]})
    write_shards(tmp_path / "in", [*samples[:7], lacking], per_shard=4)
    shards = resolve_shards(tmp_path / "in", endpoint=None)
    message = r"shard 's-000001.tar', key 'odd/one': no photo 'image.jpg' \(found: cls, trimap.png\); "
    with pytest.raises(DataError, match=message):
        _export(shards, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_without_any_photo_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "s-000000.tar", [Sample("a", {"txt": b"1", "cls": b"1"})])
    shards = resolve_shards(tmp_path, endpoint=None)
    index_shards(shards)
    with pytest.raises(DataError, match=r"no component is a photo by its name \(found: cls, txt\); .*--photo"):
        _export(shards, tmp_path / "out")


def test_export_shard_that_is_cut_meanwhile_leaves_no_file(shards: ShardSet, tmp_path: Path) -> None:
    """The files before it stay; run again on shards that are whole, the rest is written."""
    path = Path(shards.store.locate(shards.names[2]))
    whole = path.read_bytes()
    original = LocalStore.write_stream

    def cutting(self: Store, name: str, chunks: object, *, num_bytes: int) -> None:
        if name.endswith("2.tfrecord"):
            path.write_bytes(whole[:2000])
        original(self, name, chunks, num_bytes=num_bytes)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalStore, "write_stream", cutting)
        with pytest.raises(DataError, match=r"s-000002.tar' ends at byte 2000: it became shorter during the export"):
            _export(shards, tmp_path / "out", jobs=1)
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == [
        "samples-000000.tfrecord",
        "samples-000001.tfrecord",
    ]
    path.write_bytes(whole)
    assert _export(shards, tmp_path / "out").num_written == 2


MEMORY = """
import resource, sys
from pathlib import Path
from prep.export.export import export_tfrecords
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
shards = resolve_shards(sys.argv[1], endpoint=None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_tfrecords(shards, store=LocalStore(Path(sys.argv[2])), prefix="samples-", jobs=1)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_export_holds_a_piece_and_a_record_and_not_a_file(tmp_path: Path) -> None:
    """A shard of 96 MiB costs less than a quarter of that, with all that is imported."""
    noise = np.random.default_rng(0).bytes(1 << 20)
    rows = [Sample(f"{number:03d}", {"jpg": b"\xff\xd8\xff" + noise, "cls": b"1"}) for number in range(96)]
    write_tar(tmp_path / "s-000000.tar", rows)
    index_shards(resolve_shards(tmp_path, endpoint=None))
    process = start_python(MEMORY, tmp_path, tmp_path / "out")
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert int(said) < 24 << 20
    assert (tmp_path / "out" / "samples-000000.tfrecord").stat().st_size > 96 << 20


def test_export_starts_no_worker_with_numpy() -> None:
    """It would cost each a tenth of a second, and thirty megabytes."""
    told, _ = start_python("import sys, prep.export.tasks; print('numpy' in sys.modules)").communicate()
    assert told == "False\n"


def test_record_index_counts_from_the_files_start() -> None:
    assert record_index([]) == b""
    assert record_index([20, 17, 3]) == b"0 20\n20 17\n37 3\n"


def test_export_command_tells_what_was_written(shards: ShardSet, tmp_path: Path) -> None:
    arguments = ["export", "tfrecord", str(shards.store.url), str(tmp_path / "out")]
    done = CliRunner().invoke(prep, arguments, catch_exceptions=False)
    assert done.stdout.startswith("wrote 4 files, 23 samples, ")
    assert done.stdout.endswith(f" s -> {tmp_path}/out/samples-000000.tfrecord, ...\n")
    options = ["--feature", "mask=trimap.png", "--max-bytes", "1GiB", "--json"]
    done = CliRunner().invoke(prep, [*arguments[:-1], f"{tmp_path}/all-", *options], catch_exceptions=False)
    told = json.loads(done.stdout)
    assert (told["num_written"], told["num_samples"], told["files"]) == (1, 23, ["all-000000.tfrecord"])
    assert "mask" in told["features"]
    assert told["num_bytes"] == (tmp_path / "all-000000.tfrecord").stat().st_size
    again = CliRunner().invoke(prep, arguments, catch_exceptions=False)
    assert "(4 of the files were there already)" in again.stdout
    manifest = find_manifest(shards)
    assert manifest is not None
    assert manifest.num_samples == told["num_samples"]
