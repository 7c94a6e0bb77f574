"""Test the embedded node's dSort where it is stricter than a cluster, or where a cluster cannot be tested."""

import time
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.store.templates import Template
from prep.embedded.dsort.job import SortJob, read_status
from prep.embedded.dsort.spec import SortSpec
from prep.embedded.storage import Storage
from prep.embedded.wire import RefusalError
from tests.prep.embedded.tars import make_tar, read_tar

SPEC: dict[str, Any] = {
    "input_bck": {"name": "b", "provider": "ais"},
    "input_format": {"template": "in-{0..1}"},
    "input_extension": ".tar",
    "output_format": "out-{00..99}",
    "output_shard_size": "200B",
    "algorithm": {"kind": "shuffle", "seed": "1"},
}


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """A bucket ``b`` with two shards of ten samples each."""
    made = Storage(tmp_path)
    made.create_bucket("b")
    for shard in range(2):
        members = {f"{shard}{index}.jpg": bytes([index]) * 50 for index in range(10)}
        made.write("b", f"in-{shard}.tar", [make_tar(members)])
    return made


def run(storage: Storage, *, abort: bool = False, endpoint: str = "", **changes: object) -> dict[str, Any]:
    """Run a job and return its last status."""
    job = SortJob(SortSpec.parse(SPEC | changes), storage, "target", endpoint=endpoint)
    if abort:
        storage.abort_job(job.job)
    job.start()
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        status = read_status(storage, job.job)
        assert status is not None
        if status["target"]["archived"]:
            return dict(status["target"])
        time.sleep(0.005)
    raise AssertionError(status)


def read_all(storage: Storage, prefix: str) -> dict[str, bytes]:
    found = {}
    for name in storage.list_names("b", prefix=prefix):
        file, meta = storage.open("b", name)
        with file:
            found[name] = file.read(meta.num_bytes)
    return found


def test_same_seed_gives_the_same_shards(storage: Storage) -> None:
    """The shards are equal byte by byte; another seed gives other shards."""
    for prefix, seed in (("x", "5"), ("y", "5"), ("z", "6")):
        status = run(storage, output_format=f"{prefix}-{{00..99}}", algorithm={"kind": "shuffle", "seed": seed})
        assert status["Metrics"]["shard_creation"]["finished"]
    first, again, other = (list(read_all(storage, prefix).values()) for prefix in "xyz")
    assert len(first) == 5
    assert first == again
    assert first != other


def test_abort_stops_the_job(storage: Storage) -> None:
    """The status says so as AIS does; nothing is written."""
    status = run(storage, abort=True)
    assert (status["aborted"], status["Metrics"]["aborted"]) == (True, True)
    assert status["Metrics"]["errors"] == [f"t[target]: [dsort] {status['id']} aborted"]
    assert read_all(storage, "out-") == {}


def test_job_of_a_node_that_has_gone_is_aborted(storage: Storage, tmp_path: Path) -> None:
    """A client that waits through another node does not wait for ever."""
    job = SortJob(SortSpec.parse(SPEC), storage, "target")
    job._save()  # begun, and not ended
    with Storage(tmp_path) as other:
        before = read_status(other, job.job)
        assert before is not None
        assert not before["target"]["aborted"]
        storage.close()
        after = read_status(other, job.job)
        assert after is not None
        assert after["target"]["aborted"]
        assert "has gone" in after["target"]["Metrics"]["errors"][0]


def test_output_that_would_replace_an_input_is_refused(storage: Storage) -> None:
    """Otherwise the only copy of the data would be lost."""
    before = read_all(storage, "in-")
    status = run(storage, output_format="in-{0..9}")
    assert "output shard 'in-0.tar' is an input too" in status["Metrics"]["errors"][0]
    assert read_all(storage, "in-") == before


def test_key_map_with_a_name_that_leads_elsewhere_is_refused(storage: Storage) -> None:
    """The status explains it; nothing is written."""
    storage.write("b", "map.json", [b'{"../c-{0..9}": ["00"]}'])
    status = run(storage, endpoint="http://node", ekm_file="http://node/v1/objects/b/map.json")
    assert status["Metrics"]["errors"] == ['invalid object name "../c-0.tar"']
    assert storage.list_names("b") == ["in-0.tar", "in-1.tar", "map.json"]


def test_bad_member_names_its_shard(storage: Storage) -> None:
    """A key in two shards is refused; a cluster would mix the files of both."""
    storage.write("b", "in-1.tar", [make_tar({"00.jpg": b"x"})])
    status = run(storage)
    assert "shard 'in-1.tar', key '00': is in shard 'in-0.tar' too" in status["Metrics"]["errors"][0]
    assert read_all(storage, "out-") == {}


def test_no_output_size_spreads_over_the_names(storage: Storage) -> None:
    """1,000 bytes are spread over four names."""
    run(storage, output_shard_size="", output_format="out-{0..3}")
    shards = read_all(storage, "out-").values()
    assert [len(read_tar(shard)) for shard in shards] == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a-{0..2}", ["a-0", "a-1", "a-2"]),
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{0..4..2}", ["0", "2", "4"]),
        ("{0..1}/{00..01}", ["0/00", "0/01", "1/00", "1/01"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{8..010}", ["8", "9", "10"]),  # the shorter number gives the width
        ("plain", []),  # no range, no name
        ("a-{0..", []),
    ],
)
def test_template_names(text: str, expected: list[str]) -> None:
    """Templates expand as in AIS."""
    template = Template.parse(text)
    assert list(template.names()) == expected
    assert len(template) == len(expected)


@pytest.mark.parametrize("text", ["{a..b}", "{2..1}", "{0..9..0}", "{}", "}x{", "{0..1}{"])
def test_template_that_is_none_is_refused(text: str) -> None:
    """The answer is 400; a cluster closes the connection."""
    with pytest.raises(RefusalError) as refused:
        SortSpec.parse(SPEC | {"input_format": {"template": text}})
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"output_shard_size": "-1"}, 400),
        ({"output_shard_size": "big"}, 400),
        ({"output_format": ""}, 400),
        ({"output_format": "plain"}, 400),
        ({"algorithm": {"kind": "sideways"}}, 400),
        ({"algorithm": {"kind": "shuffle", "seed": "x"}}, 400),
        ({"input_bck": None}, 400),
        ({"input_bck": {"name": "../b"}}, 400),
        ({"input_bck": {"name": "b", "provider": "aws"}}, 501),
        ({"algorithm": {"kind": "md5"}}, 501),
        ({"algorithm": {"kind": "content"}}, 400),
        ({"algorithm": {"kind": "content", "extension": "cls", "content_key_type": "int"}}, 400),  # no dot
        ({"algorithm": {"kind": "content", "extension": ".cls", "content_key_type": "date"}}, 400),
        ({"ekm_file": "http://127.0.0.1/ekm", "output_shard_size": ""}, 400),
        ({"output_extension": ".zip"}, 501),
    ],
)
def test_spec_that_cannot_run_is_refused(changes: dict[str, object], status: int) -> None:
    """The request is refused before a job begins."""
    with pytest.raises(RefusalError) as refused:
        SortSpec.parse(SPEC | changes)
    assert refused.value.status == status


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4KB", 4096), ("4KiB", 4096), ("1000B", 1000), ("12", 12), ("1.5 MiB", 3 << 19), ("2G", 2 << 30)],
)
def test_spec_sizes_are_binary(text: str, num_bytes: int) -> None:
    """AIS reads KB as 1,024 bytes."""
    assert SortSpec.parse(SPEC | {"output_shard_size": text}).output_shard_size == num_bytes
