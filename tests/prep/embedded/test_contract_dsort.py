"""Test what the project needs of AIStore's dSort: on the embedded node, and on a cluster if one is named."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from aistore import Client
from aistore.sdk.bucket import Bucket
from aistore.sdk.dsort import Dsort
from aistore.sdk.errors import AISError, ErrBckNotFound
from aistore.sdk.wait_result import WaitResult

from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.shard_set import ShardSet
from prep.shuffle.key_map import parse_key_map
from prep.shuffle.order import Algorithm
from prep.shuffle.request import Engine, Request, read_spec, request_of_spec
from prep.shuffle.shuffle import shuffle
from tests.prep.embedded.conftest import get, put
from tests.programs import wait_until
from tests.shards import read_tar, tar_bytes

NUM_SAMPLES = 24


@pytest.fixture
def given(sdk_bucket: Bucket) -> dict[str, bytes]:
    """24 samples of three members in four shards ``in-0.tar`` ...; all members by name."""
    members = {}
    for index in range(NUM_SAMPLES):
        for component in ("seg.png", "cls", "jpg"):
            members[f"d/{index:04}.{component}"] = f"{index}/{component}".encode() * 20
    names = list(members)
    for shard in range(4):
        put(
            sdk_bucket,
            f"in-{shard}.tar",
            tar_bytes({name: members[name] for name in names[shard * 18 : shard * 18 + 18]}),
        )
    return members


def sort(client: Client, bucket: Bucket, tmp_path: Path, **changes: object) -> tuple[Dsort, WaitResult]:
    """Run a shuffle with these changes to its spec, and wait for it."""
    spec = {
        "description": "contract",
        "input_extension": ".tar",
        "input_bck": {"name": bucket.name, "provider": "ais"},
        "output_bck": {"name": bucket.name, "provider": "ais"},
        "input_format": {"template": "in-{0..3}"},
        "output_format": "out-{00..99}",
        "output_shard_size": "1KB",
        "algorithm": {"kind": "shuffle", "seed": "7"},
    } | changes
    (tmp_path / "spec.json").write_text(json.dumps({key: value for key, value in spec.items() if value is not None}))
    job = client.dsort()
    try:
        job.start(tmp_path / "spec.json")
    except AISError as exc:
        if is_without_dsort(exc):
            pytest.skip(f"this cluster starts no dSort, it answers {exc.status_code}")
        raise

    def is_over() -> bool:  # wait() polls only every few seconds
        infos = job.get_job_info().values()
        return all(info.metrics.shard_creation.finished for info in infos) or all(
            info.metrics.aborted for info in infos
        )

    wait_until(is_over)
    return job, job.wait(timeout=120, verbose=False)


def is_without_dsort(exc: BaseException | None) -> bool:
    """Whether a cluster can start no job at all: AIS 5.0 fails in its own broadcast, others are built without dSort.

    The embedded node always can.
    """
    if not isinstance(exc, AISError) or isinstance(exc, ErrBckNotFound) or not os.environ.get("AIS_ENDPOINT"):
        return False
    return exc.status_code in (404, 405, 501) or (exc.status_code == 400 and "stats.NodeStatus" in exc.message)


def errors_of(job: Dsort) -> str:
    """Return the errors of all nodes: the node that ``WaitResult`` shows may only know that another node failed."""
    return "; ".join(error for info in job.get_job_info().values() for error in info.metrics.errors or [])


def outputs(bucket: Bucket, prefix: str = "out-") -> dict[str, list[tuple[str, bytes]]]:
    names = (entry.name for entry in bucket.list_all_objects(prefix=prefix) if not entry.name.endswith(".json"))
    return {name: read_tar(get(bucket, name)) for name in names}


def test_dsort_shuffles_whole_samples(
    client: Client, sdk_bucket: Bucket, given: dict[str, bytes], tmp_path: Path
) -> None:
    """Every member comes out once, unchanged, in shards named by the template; samples stay together, in order."""
    job, result = sort(client, sdk_bucket, tmp_path)
    assert result.success, result.error
    found = outputs(sdk_bucket)
    assert list(found) == [f"out-{index:02}.tar" for index in range(len(found))]
    members = [member for shard in found.values() for member in shard]
    assert sorted(members) == sorted(given.items())
    keys = [name.partition(".")[0] for name, _ in members]
    assert keys[::3] == keys[1::3] == keys[2::3]
    assert keys[::3] != sorted(keys[::3])
    assert {tuple(name.partition(".")[2] for name, _ in members[at : at + 3]) for at in range(0, len(members), 3)} == {
        ("seg.png", "cls", "jpg")
    }
    sizes = [sum(len(data) for _, data in shard) for shard in found.values()]
    largest_sample = 3 * 20 * len("23/seg.png")
    assert all(1024 <= size < 1024 + largest_sample for size in sizes[:-1])  # a target; the last takes what is left
    infos = job.get_job_info().values()
    assert sum(int(info.metrics.shard_creation.created_count) for info in infos) == len(found)
    assert sum(int(info.metrics.local_extraction.extracted_record_count) for info in infos) == len(given)


def in_shards(bucket: Bucket) -> ShardSet:
    endpoint = bucket.client.base_url.removesuffix("/v1")
    return ShardSet(store=AisStore(endpoint, bucket.name), names=tuple(f"in-{index}.tar" for index in range(4)))


def keys_of(bucket: Bucket, names: Iterable[str]) -> list[str]:
    members = [member for name in names for member, _ in read_tar(get(bucket, name))]
    return list(dict.fromkeys(name.partition(".")[0] for name in members))


def test_shuffle_by_dsort_says_what_is_missing(sdk_bucket: Bucket, given: dict[str, bytes]) -> None:
    """With ``engine="dsort"`` the cluster does it, or an error says what to do instead, and nothing is written.

    ``auto`` and ``exchange`` put the same samples into new shards on any cluster.
    """
    refused: StoreError | None = None
    try:
        report = shuffle(
            Request(in_shards(sdk_bucket), output_prefix="out-", algorithm=Algorithm(seed=7), engine="dsort")
        )
    except StoreError as exc:
        if not is_without_dsort(exc.__cause__):
            raise
        refused = exc
    if refused is None:
        assert report.engine == "dsort"
        assert sorted(keys_of(sdk_bucket, report.shards)) == sorted({name.partition(".")[0] for name in given})
    else:
        endpoint = sdk_bucket.client.base_url.removesuffix("/v1")
        assert str(refused).startswith(f"no dSort that works at {endpoint}: ")
        assert str(refused).endswith("shuffle from here: --engine exchange")
        assert outputs(sdk_bucket) == {}
    for engine in ("auto", "exchange"):
        request = Request(in_shards(sdk_bucket), output_prefix=f"{engine}-", algorithm=Algorithm(seed=7), engine=engine)
        names = shuffle(request).shards
        assert sorted(member for name in names for member in read_tar(get(sdk_bucket, name))) == sorted(given.items())


@pytest.mark.parametrize("engine", ["auto", "exchange"])
def test_shuffle_orders_by_every_algorithm(sdk_bucket: Bucket, given: dict[str, bytes], engine: Engine) -> None:
    """Both engines give the same order on clusters of any size. (A random order depends on the size.)"""
    ordered = sorted({name.partition(".")[0] for name in given})
    for algorithm, expected in (
        (Algorithm(kind="alphanumeric", decreasing=True), ordered[::-1]),
        (Algorithm(kind="content", component="cls"), sorted(ordered, key=lambda key: given[f"{key}.cls"])),
        (Algorithm(kind="none"), ordered),
    ):
        request = Request(in_shards(sdk_bucket), algorithm=algorithm, output_prefix=f"{algorithm.kind}-", engine=engine)
        assert keys_of(sdk_bucket, shuffle(request).shards) == expected


@pytest.mark.parametrize("engine", ["auto", "exchange"])
def test_shuffle_by_key_map(sdk_bucket: Bucket, given: dict[str, bytes], engine: Engine) -> None:
    """It also works if the nodes of a cluster refuse each other at their public ports: the target can read the map."""
    mapped = parse_key_map(
        b'{"low-{0..9}.tar": ["^d/000", "d/0010"], "rest-{0..9}": ["d/001[1-9]", "^d/002"]}', where="m"
    )
    report = shuffle(
        Request(
            in_shards(sdk_bucket),
            mapped=mapped,
            algorithm=Algorithm(kind="alphanumeric"),
            output_prefix="out-",
            shard_bytes=2 << 10,
            engine=engine,
        )
    )
    names = {prefix: [name for name in report.shards if name.startswith(prefix)] for prefix in ("low-", "rest-")}
    assert keys_of(sdk_bucket, names["low-"]) == [f"d/{index:04}" for index in range(11)]
    assert keys_of(sdk_bucket, names["rest-"]) == [f"d/{index:04}" for index in range(11, NUM_SAMPLES)]
    assert [len(found) for found in names.values()] == [6, 7]  # two samples fill 2 KiB: 512 a member are counted
    assert [entry.name for entry in sdk_bucket.list_all_objects() if "key-map" in entry.name] == []


@pytest.mark.parametrize("extension", [".tgz", ".tar.gz"])
def test_shuffle_of_compressed_shards(sdk_bucket: Bucket, given: dict[str, bytes], extension: str) -> None:
    """Shards are written compressed, and read again."""
    there = shuffle(
        Request(in_shards(sdk_bucket), output_prefix="packed-", extension=extension, algorithm=Algorithm(seed=7))
    )
    assert all(name.endswith(extension) for name in there.shards)
    packed = ShardSet(store=in_shards(sdk_bucket).store, names=there.shards)
    again = shuffle(Request(packed, output_prefix="out-", extension=".tar", algorithm=Algorithm(kind="alphanumeric")))
    assert sorted(member for name in again.shards for member in read_tar(get(sdk_bucket, name))) == sorted(
        given.items()
    )


def test_shuffle_by_a_spec_as_the_sdk_takes_it(sdk_bucket: Bucket, given: dict[str, bytes], tmp_path: Path) -> None:
    """A list of shards that are not numbered consecutively goes into another bucket."""
    target = f"{sdk_bucket.name}-out"
    (tmp_path / "spec.yaml").write_text(
        f"""
input_bck: {{name: {sdk_bucket.name}, provider: ais}}
output_bck: {{name: {target}, provider: ais}}
input_format: {{objnames: [in-3.tar, in-0.tar]}}
output_format: "out-{{00..99}}"
output_shard_size: 1KB
algorithm: {{kind: alphanumeric}}
"""
    )
    endpoint = sdk_bucket.client.base_url.removesuffix("/v1")
    try:
        report = shuffle(request_of_spec(read_spec(tmp_path / "spec.yaml"), endpoint=endpoint))
        store = AisStore(endpoint, target)
        members = [member for name in report.shards for member in read_tar(store.read(name))]
        names = list(given)
        assert sorted(members) == sorted((name, given[name]) for name in [*names[:18], *names[54:]])
    finally:
        AisStore(endpoint, target).client.bucket(target).delete(missing_ok=True)


@pytest.mark.parametrize("template", ["absent-{0..3}", "in-{0.."])
def test_dsort_of_no_shard_succeeds_with_nothing(
    client: Client, sdk_bucket: Bucket, given: dict[str, bytes], tmp_path: Path, template: str
) -> None:
    """The job succeeds, so a client must check the outputs. A template without a range names no shards."""
    _, result = sort(client, sdk_bucket, tmp_path, input_format={"template": template})
    assert result.success
    assert outputs(sdk_bucket) == {}


def test_dsort_with_too_few_names_fails_and_says_so(
    client: Client, sdk_bucket: Bucket, given: dict[str, bytes], tmp_path: Path
) -> None:
    """The error tells the number of names; nothing is written."""
    job, result = sort(client, sdk_bucket, tmp_path, output_format="out-{0..1}")
    assert not result.success
    assert "number of shards to be created exceeds expected number of shards (2)" in errors_of(job)
    assert outputs(sdk_bucket) == {}


def test_dsort_of_a_missing_bucket_or_job_is_refused(client: Client, sdk_bucket: Bucket, tmp_path: Path) -> None:
    """A job on a missing bucket is refused at the start; an unknown job gives 404."""
    sort(client, sdk_bucket, tmp_path, input_format={"template": "absent-{0..3}"})  # skips a server without dSort
    with pytest.raises(AISError) as missing:
        Dsort(client._request_client, "srt-nosuch").get_job_info()
    assert missing.value.status_code == 404
    with pytest.raises(ErrBckNotFound):
        sort(client, sdk_bucket, tmp_path, input_bck={"name": "contract-nosuch", "provider": "ais"})


def test_dsort_of_a_broken_shard_fails(
    client: Client, sdk_bucket: Bucket, given: dict[str, bytes], tmp_path: Path
) -> None:
    """The job fails, and one of its errors names the shard; nothing is written."""
    put(sdk_bucket, "in-2.tar", get(sdk_bucket, "in-2.tar")[:2648])  # in a member's bytes
    job, result = sort(client, sdk_bucket, tmp_path)
    assert not result.success
    assert "in-2.tar" in errors_of(job)
    assert outputs(sdk_bucket) == {}
