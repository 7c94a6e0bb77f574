"""Packs by several processes, interrupted ones, and those that run out of room or memory."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import requests

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.base import Store
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore
from prep.sources.folders import pets
from prep.sources.record import Record, Source
from prep.tar.writer import Range
from tests.programs import start_python, wait_until
from tests.shards import contents_of, encode_photo, files_of, make_source, pack, write_pets

GIF = encode_photo("gif", mode="L")


LONG_PACK = """
import sys
from pathlib import Path
from tests.shards import pack
from prep.sources.record import Record, Source
from dali_pipes.store.local import LocalStore

big = Path(sys.argv[1])
records = [Record(key=str(number), components={"bin": big}, label=0) for number in range(40)]
pack(Source(name="big", records=records, classes={0: "zero"}), store=LocalStore(Path(sys.argv[2])), max_count=1, jobs=2)
"""


def test_pack_interrupted_by_ctrl_c_leaves_whole_shards_and_is_finished_by_running_again(tmp_path: Path) -> None:
    """Two are being written when it comes; of neither is anything left."""
    out, big = tmp_path / "out", tmp_path / "big"
    with big.open("wb") as stream:
        stream.truncate(10 << 20)
    process = start_python(LONG_PACK, big, out)
    wait_until(lambda: len(list(out.glob("*.tar"))) >= 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert errors.rstrip().endswith("KeyboardInterrupt")

    written = sorted(files_of(out).keys() - {".dali-pipes/samples-written.json"})
    assert 2 <= len(written) < 40
    assert all(re.fullmatch(r"samples-\d{6}\.tar", name) for name in written)
    assert {(out / name).stat().st_size for name in written} == {(10 << 20) + 10240}

    process = start_python(LONG_PACK.replace("range(40)", f"range({len(written) + 2})"), big, out)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    assert files_of(out).keys() == {f"samples-{number:06d}.tar" for number in range(len(written) + 2)} | {
        ".dali-pipes/samples-classes.json",
        ".dali-pipes/samples-written.json",
    }


NO_ROOM = """
import resource, sys
from pathlib import Path
from dali_pipes.errors import StoreError
from dali_pipes.store.local import LocalStore
from tests.shards import make_source, pack

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    pack(make_source(200), store=LocalStore(Path(sys.argv[1])), max_count=100)
except StoreError as exc:
    print(exc)
"""


def test_pack_out_of_room_says_where_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    source = make_source(200)
    planned = pack(source, store=LocalStore(tmp_path / "planned"), max_count=100)
    sizes = [(tmp_path / "planned" / name).stat().st_size for name in planned.shards]
    assert sizes[0] < sizes[1]
    output, errors = start_python(NO_ROOM, tmp_path / "out", str(sizes[1] - 1)).communicate(timeout=300)
    assert (output, errors) == (f"cannot write '{tmp_path}/out/samples-000001.tar': File too large\n", "")
    assert list(files_of(tmp_path / "out")) == [".dali-pipes/samples-written.json", "samples-000000.tar"]
    assert pack(source, store=LocalStore(tmp_path / "out"), max_count=100).num_written == 1


@pytest.fixture
def _shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes for the smallest set, too."""
    monkeypatch.setattr("prep.pack.check.MIN_SHARED_RECORDS", 0)
    monkeypatch.setattr("prep.pack.check.NUM_RECORDS", 5)
    monkeypatch.setattr("prep.pack.target.MIN_SHARED_BYTES", 0)


@pytest.mark.usefixtures("_shared")
def test_pack_by_processes_gives_the_same_bytes_notes_and_reports(store: Store, tmp_path: Path) -> None:
    """Photos come from files and from memory; a second run writes the missing shards, a third run none."""
    write_pets(tmp_path / "in", {f"Abyssinian_{number}": 1 for number in range(23)})
    (tmp_path / "in" / "images" / "Abyssinian_7.jpg").write_bytes(encode_photo("png"))
    (tmp_path / "in" / "images" / "Abyssinian_12.jpg").write_bytes(GIF)
    alone = LocalStore(tmp_path / "alone")
    for source, prefix in ((pets(tmp_path / "in"), "samples-"), (make_source(23), "made-")):
        one = pack(source, store=alone, prefix=prefix, max_count=4, on_bad="skip", jobs=1)
        two = pack(source, store=store, prefix=prefix, max_count=4, on_bad="skip", jobs=2)
        assert (two.shards, two.num_samples, two.num_bytes) == (one.shards, one.num_samples, one.num_bytes)
        assert (two.skipped, two.noted, two.num_written) == (one.skipped, one.noted, 6)
    assert contents_of(store) == contents_of(alone)
    store.delete("made-000003.tar")
    for num_written in (1, 0):
        assert pack(source, store=store, prefix="made-", max_count=4, jobs=2).num_written == num_written
    assert contents_of(store) == contents_of(alone)


@pytest.mark.usefixtures("_shared")
def test_pack_by_processes_fails_as_in_one(tmp_path: Path) -> None:
    """The caller gets the errors of workers unchanged: bad records, and a missing file that many records share."""
    out = LocalStore(tmp_path / "out")
    source = pets(write_pets(tmp_path / "in", {f"Abyssinian_{number}": 1 for number in range(23)}))
    (tmp_path / "in" / "images" / "Abyssinian_7.jpg").write_bytes(GIF)
    (tmp_path / "in" / "images" / "Abyssinian_9.jpg").unlink()
    with pytest.raises(DataError, match=r"2 of 23 records .* bad: Abyssinian_7: .* a GIF.*; Abyssinian_9: .* No such"):
        pack(source, store=out, max_count=4, jobs=2)
    parts = [Record(key=f"{n}", components={"jpg": Range(tmp_path / "gone", n, 1)}, label=0) for n in range(23)]
    with pytest.raises(StoreError, match=r"cannot read '.*/gone': No such file"):
        pack(Source(name="made up", records=parts, classes={}), store=out, on_bad="skip", jobs=2)
    assert not out.directory.exists()


PEAK = """
import json, resource, sys
from pathlib import Path
from prep.pack.pack import PackJob, pack
from prep.sources.record import Record, Source
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.local import LocalStore

folder, where, num = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = AisStore(where, "peak") if where.startswith("http") else LocalStore(Path(where))
small = Record(key="a", components={"json": b"1"}, label=0)
pack(Source(name="small", records=[small], classes={}), PackJob(store=store))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
records = [Record(key=str(number), components={"bin": folder / "big"}, label=0) for number in range(num)]
source = Source(name="big", records=records, classes={})
report = pack(
    source, PackJob(store=store, prefix="big-", max_bytes=1 << 40, max_count=num // 2, jobs=int(sys.argv[4]))
)
own, workers = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps([report.num_bytes, own - before, workers]))
"""


@pytest.mark.fresh_interpreter
def test_pack_holds_a_mebibyte_of_files_and_shards_of_any_size(store: Store, tmp_path: Path) -> None:
    """Two shards of 128 MiB, each of two files of 64 MiB."""
    jobs = 2 if isinstance(store, AisStore) else 1
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "big").open("wb") as stream:
        stream.truncate(64 << 20)
    where = store.endpoint if isinstance(store, AisStore) else str(store.url)
    process = start_python(PEAK, tmp_path / "in", where, "4", str(jobs))
    output, errors = process.communicate(timeout=300)
    assert errors == ""
    num_bytes, own_kib, workers_kib = json.loads(output)
    assert num_bytes > 256 << 20
    assert own_kib < 16 << 10
    if jobs == 2:
        assert workers_kib < 120 << 10  # an interpreter with `requests`, which has 35 MiB


@pytest.mark.parametrize("checksum_type", ["md5", "none"])
def test_pack_again_into_a_bucket_of_another_checksum_writes_nothing_anew(node: str, checksum_type: str) -> None:
    """Compared by the bucket's own checksum, or where it has none by reading the shards."""
    store = AisStore(node, f"pack-{checksum_type}")
    store.create()
    url = f"{store.endpoint}/v1/buckets/{store.bucket}"
    message: Any = {"action": "set-bprops", "value": {"checksum": {"type": checksum_type}}}
    assert requests.patch(url, json=message, timeout=120).status_code == 200
    assert pack(make_source(23), store=store, max_count=10).num_written == 3
    assert pack(make_source(23), store=store, max_count=10).num_written == 0
    with pytest.raises(StoreError, match=r"holds shards with other content: .*; --overwrite"):
        pack(make_source(23, seed=1), store=store, max_count=10)
    assert pack(make_source(23, seed=1), store=store, max_count=10, overwrite=True).num_written == 3
