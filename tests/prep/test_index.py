"""`prep index` and a manifest that is there; what `verify` and `info` say of shards that differ from it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.named import name_shards
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import index_name, manifest_name
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.urls import open_store, resolve_shards
from prep.index import index_shards
from tests.prep.commands.calls import call_prep, json_of_prep, run_prep
from tests.shards import fill_bucket, make_samples, write_tar

NAMES = tuple(f"s-{row:06d}.tar" for row in range(4))
LACKING = NAMES[1]


def manifest_of(four_shards: Path) -> bytes:
    return (four_shards / manifest_name("s-")).read_bytes()


def refuse(*arguments: str | Path, expect: str) -> None:
    """Assert that a command fails with an error that matches ``expect``."""
    run_prep(*arguments, expect=StoreError, match=expect)


@pytest.mark.parametrize(
    ("url", "option"),
    [
        ("{}", "--allow-missing"),
        ("{}/s-", "--allow-missing"),
        ("{}/*.tar", "--allow-missing"),
        ("{}/s-{{000002..000003}}.tar", "--overwrite"),  # the URL names a part of the set
    ],
)
def test_index_drops_no_shard_from_a_manifest_without_overwrite(four_shards: Path, url: str, option: str) -> None:
    """A listing that lacks a shard, or a part of the set that is named, is no reason."""
    if option == "--allow-missing":
        (four_shards / LACKING).unlink()
    before, url = manifest_of(four_shards), url.format(four_shards)
    refuse("index", url, expect=f"{LACKING}'.*{option}")
    assert manifest_of(four_shards) == before
    run_prep("index", url, option)
    assert LACKING not in name_shards(four_shards, endpoint=None).names


def test_index_adds_shards_and_keeps_the_others(four_shards: Path) -> None:
    write_tar(four_shards / "s-000004.tar", make_samples([(30, 30)], first=50))
    run_prep("index", four_shards)
    assert name_shards(four_shards, endpoint=None).names == (*NAMES, "s-000004.tar")


def test_a_first_index_of_shards_with_gaps_in_their_numbers_is_refused(four_shards: Path) -> None:
    """A shard was lost after the pack, so the number sequence has a gap."""
    for name in (manifest_name("s-"), LACKING):
        (four_shards / name).unlink()
    refuse(
        "index", four_shards, expect=f"no shard '{four_shards}/{LACKING}'; .* its 3 shards have gaps, missing: 1 of 4"
    )
    run_prep("index", four_shards, "--allow-missing")
    run_prep("index", four_shards)  # the manifest lists these shards, so no option is needed


def test_index_replaces_a_manifest_that_it_cannot_read(four_shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as one of an earlier version."""
    (four_shards / manifest_name("s-")).write_bytes(b"no manifest")
    run_prep("index", four_shards)
    assert "it is replaced" in caplog.text
    assert name_shards(four_shards, endpoint=None).names == NAMES


def test_index_that_is_killed_leaves_the_manifest_whole(four_shards: Path) -> None:
    """In the middle of a shard, which is a pipe here."""
    os.mkfifo(four_shards / "s-000004.tar")
    before = manifest_of(four_shards)
    code = (
        "import sys; from prep.index import index_shards; from dali_pipes.store.urls import resolve_shards; "
        "from dali_pipes.store.shard_set import ShardSet; shards = resolve_shards(sys.argv[1], endpoint=None); "
        "ShardSet.entries = lambda self: [type('E', (), {'size': 1 << 20})] * 5; index_shards(shards, anew=True)"
    )
    with (
        subprocess.Popen([sys.executable, "-c", code, str(four_shards)]) as process,
        (four_shards / "s-000004.tar").open("wb") as pipe,  # waits until the indexer opens it
    ):
        pipe.write((four_shards / NAMES[0]).read_bytes()[:1024])
        pipe.flush()
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert manifest_of(four_shards) == before
    indexed = DataSet(name_shards(four_shards, endpoint=None))
    assert indexed.manifest.names == NAMES
    assert [len(indexed.read_index(row)) for row in range(4)] == indexed.manifest.index_bytes.tolist()


def wait_for_clock(four_shards: Path) -> None:
    """Until a file that is written now has a later time than the shards; file systems' clocks are coarse."""
    probe = four_shards / ".probe"
    last = max((four_shards / name).stat().st_ctime_ns for name in NAMES)
    while not (probe.exists() and probe.stat().st_mtime_ns > last):
        probe.write_bytes(b"")


def test_index_that_is_run_again_takes_over_only_indexes_of_the_shards_as_they_are(four_shards: Path) -> None:
    """In a directory: by size and time. A damaged index, one that the manifest does not list, and a copy are not."""
    before: list[int] = []

    def index_again(**options: bool) -> list[bytes]:
        index_shards(resolve_shards(four_shards, endpoint=None), on_before=before.append, **options)
        return [(four_shards / name).read_bytes() for name in (manifest_name("s-"), *map(index_name, NAMES))]

    wait_for_clock(four_shards)
    files = index_again(anew=True)
    assert index_again() == files
    assert before == [0, 4]
    shard = four_shards / NAMES[0]
    shard.write_bytes(shard.read_bytes().replace(b"ustar", b"ustaR", 1).replace(b"ustaR", b"ustar", 1))  # written anew
    (four_shards / index_name(NAMES[1])).write_bytes(b"damaged")
    other = (four_shards / index_name(NAMES[2])).read_bytes()
    (four_shards / index_name(NAMES[3])).write_bytes(other)
    assert index_again() == files
    assert before[2] == 1
    index = four_shards / index_name(NAMES[0])
    os.utime(index, ns=(0, 0))  # a copy that keeps its time
    assert index_again() == files
    assert before[3] == 3


def test_index_that_the_manifest_does_not_list_is_made_anew(four_shards: Path) -> None:
    """It is whole, and of the same shard, but says something else; the manifest may have another order."""
    before: list[int] = []
    shards = resolve_shards(four_shards, endpoint=None)
    wait_for_clock(four_shards)
    index_shards(replace(shards, names=(NAMES[3], *NAMES[:3]), manifest=None), anew=True)
    path = four_shards / index_name(NAMES[1])
    index = ShardIndex.from_bytes(path.read_bytes(), where=str(path))
    path.write_bytes(replace(index, keys=[f"x{key}" for key in index.keys]).to_bytes())
    index_shards(replace(shards, manifest=None), on_before=before.append)
    assert before == [3]
    assert ShardIndex.from_bytes(path.read_bytes(), where=str(path)).keys == index.keys


def test_index_whose_samples_share_bytes_is_refused(four_shards: Path) -> None:
    """A thousand samples in the bytes of one: a batch would take gigabytes of memory out of a shard of kilobytes."""
    path = four_shards / index_name(NAMES[1])
    index = ShardIndex.from_bytes(path.read_bytes(), where=str(path))
    repeated = index.take(np.zeros(1000, np.int64)).to_bytes()
    with pytest.raises(DataError, match=r"its places have [0-9]+ bytes in all, more than the shard's [0-9]+"):
        ShardIndex.from_bytes(repeated, where=str(path))


def test_index_of_a_bucket_goes_on_by_the_checksums_of_the_cluster(four_shards: Path, bucket: AisStore) -> None:
    fill_bucket(bucket, four_shards)
    before: list[int] = []
    shards = resolve_shards(f"{bucket.url}/s-", endpoint=bucket.endpoint)
    data = bucket.read(NAMES[0])
    bucket.write(NAMES[0], data[:512] + b"4" + data[513:])  # same size, another class id
    manifest = index_shards(shards, on_before=before.append)
    assert before == [3]
    assert manifest.checksums.tolist() == index_shards(shards, anew=True).checksums.tolist()


def test_times_that_aistore_lists_as_s3_are_not_believed(bucket: AisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the last reading: a shard index that was read is newer than the shard that was replaced."""
    pytest.importorskip("obstore", reason="reads s3:// without AIStore")
    bucket.create()
    bucket.write(NAMES[0], b"any")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(variable, "any")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{bucket.endpoint}/s3/")
    listed = open_store(f"s3://{bucket.bucket}/s-", endpoint=None)[0].list("s-")
    assert [(entry.name, entry.written_ns) for entry in listed] == [(NAMES[0], None)]


# --- what verify and info say -----------------------------------------------------------------------------------------


def test_verify_and_info_name_missing_shards_and_those_beyond_the_manifest(four_shards: Path) -> None:
    """For info, shards beyond the manifest are a remark, missing ones are an error; for verify both are."""
    verified = ("verify", four_shards, "--decoder", "pillow", "--workers", "1")
    beyond, missing = f"{four_shards}/s-000004.tar", f"{four_shards}/{LACKING}"
    run_prep(*verified)
    write_tar(Path(beyond), make_samples([(30, 30)], first=50))
    assert f"1 shard there that the manifest does not list: '{beyond}'" in run_prep("info", four_shards).stdout
    Path(missing).unlink()
    done = call_prep("info", four_shards, "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["num_shards"], found["num_samples"]) == (1, 3, 9)
    assert (found["missing"], found["beyond"]) == ([missing], [beyond])
    done = call_prep(*verified, "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["num_shards"], found["num_samples"]) == (1, 3, 9)
    assert [(one["kind"], one["shard"]) for one in found["findings"]] == [("gone", missing), ("beyond", beyond)]


def test_view_leaves_missing_shards_out_if_it_may_and_what_writes_samples_does_not(
    four_shards: Path, tmp_path: Path
) -> None:
    (four_shards / LACKING).unlink()
    refuse("view", four_shards, tmp_path / "a.png", expect=LACKING)
    assert json_of_prep("view", four_shards, tmp_path / "a.png", "--allow-missing")["num_matching"] == 9
    refuse("shuffle", four_shards, expect=LACKING)
    refuse("transform", four_shards, tmp_path / "out", "--function", "pets", expect=LACKING)
    assert not (tmp_path / "out").exists()
