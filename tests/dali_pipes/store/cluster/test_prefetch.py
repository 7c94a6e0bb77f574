"""A cluster fetches shards from its bucket's backend: the job's request, its progress, its end, its errors."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.cli import main
from dali_pipes.errors import StoreError
from dali_pipes.store.cluster import prefetch as module
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.prefetch import Prefetched, prefetch
from tests.servers.scripted import Script, Visit, scripted

IN_AWS = {"backend_bck": {"name": "b", "provider": "aws", "namespace": {"uuid": "", "name": ""}}}
NO_BACKEND = {"backend_bck": {"name": "", "provider": "", "namespace": {"uuid": "", "name": ""}}}


def part(num_objects: int, num_bytes: int, *, runs: bool = True, **more: Any) -> list[dict[str, Any]]:
    """A target's part of the job, with the fields that AIS 4.9 sends."""
    return [
        {
            "ext": None,
            "start-time": "2026-11-22T13:34:57.257261811Z",
            "end-time": "0001-01-01T00:00:00Z" if runs else "2026-11-22T13:35:43.53635993Z",
            "bck": {"name": "b", "provider": "aws", "namespace": {"uuid": "", "name": ""}},
            "id": "job-1",
            "kind": "prefetch-listrange",
            "abort-err": "",
            "err": "",
            "glob.id": "0",
            "stats": {"loc-objs": str(num_objects), "loc-bytes": str(num_bytes), "in-objs": "0", "in-bytes": "0"},
            "aborted": False,
            "is_idle": False,
            **more,
        }
    ]


def cluster(*jobs: Any, props: dict[str, Any] = IN_AWS, folder: Path | None = None) -> Script:
    """A cluster whose bucket has a backend; its job is at these points, one after the other, when it is asked."""
    left = list(jobs)

    def act(visit: Visit) -> None:
        method, name = visit.request.split(b" ", 1)[0], visit.path.partition("?")[0].rpartition("/")[2]
        if method == b"HEAD" and "/v1/buckets/" in visit.path:
            visit.say(200, **{"Ais-Bucket-Props": json.dumps(props)})
        elif method == b"POST":
            visit.say(200, b"job-1")
        elif "what=qryxstats" in visit.path:
            visit.say(200, json.dumps(left.pop(0) if len(left) > 1 else left[0]).encode())
        elif "/v1/health" in visit.path:
            visit.say(200, **{"Ais-Node-Uptime": "1"})
        elif folder is not None and (found := next(folder.rglob(name), None)) is not None:
            visit.say(200, found.read_bytes())
        else:
            visit.say(404, b"{}")

    return act


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", (0.0, 0.0))


def test_prefetch_waits_for_the_last_target() -> None:
    """A target that has not begun, or has ended, is not the end. A target that had all objects has fetched none."""
    points = [
        {"t1": [], "t2": None},
        {"t1": part(1, 100), "t2": part(0, 0, runs=False)},
        {"t1": part(2, 250, runs=False), "t2": part(0, 0, runs=False)},
    ]
    with scripted(cluster(*points)) as server:
        done = prefetch(
            AisStore(server.endpoint, "#team/b", provider="aws"), ["a", "b"], num_bytes=300, blob_threshold=7
        )
        assert done == Prefetched("job-1", 2, 250)
        (asked,) = [request for request in server.requests if request.startswith(b"POST")]
        assert asked.startswith(b"POST /v1/buckets/b?provider=aws&namespace=%40%23team HTTP")
        assert json.loads(asked.partition(b"\r\n\r\n")[2]) == {
            "action": "prefetch-listrange",
            "value": {"objnames": ["a", "b"], "blob-threshold": 7, "coer": True},
        }
        assert len([path for path in server.paths if "qryxstats" in path]) == 3


FAILURES: list[tuple[Any, str]] = [
    ({"t1": part(1, 9, runs=False), "t2": part(0, 0, runs=False, err="s3: access denied")}, "'job-1' .* access denied"),
    ({"t1": part(1, 9, runs=False, aborted=True)}, "job 'job-1' of 's3://b' at .* was aborted"),
    ({"t1": part(1, 9, runs=False, aborted=True, **{"abort-err": "out of space"})}, "'job-1' .* out of space"),
    ([1], "the server is not an AIStore .this is no list of jobs"),
]


@pytest.mark.parametrize(("jobs", "text"), FAILURES)
def test_errors_of_the_job_are_shown(jobs: Any, text: str) -> None:
    with scripted(cluster(jobs)) as server, pytest.raises(StoreError, match=text):
        prefetch(AisStore(server.endpoint, "b", provider="aws"), ["a"], num_bytes=9)


@pytest.mark.parametrize(
    ("bucket", "props", "is_behind"),
    [("b", NO_BACKEND, False), ("b", {}, False), ("b", IN_AWS, True), ("@other/b", NO_BACKEND, True)],
)
def test_bucket_of_aistore_alone_is_refused(bucket: str, props: dict[str, Any], is_behind: bool) -> None:
    with scripted(cluster({"t": part(0, 0, runs=False)}, props=props)) as server:
        store = AisStore(server.endpoint, bucket)
        if is_behind:
            assert prefetch(store, ["a"], num_bytes=1).num_objects == 0
            return
        with pytest.raises(ValueError, match=r"'ais://b' has no backend: .* cache warm URL --cache DIRECTORY"):
            prefetch(store, ["a"], num_bytes=1)
        assert not [request for request in server.requests if request.startswith(b"POST")]


def test_ctrl_c_ends_the_wait_and_not_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "pause", interrupt)
    with scripted(cluster({"t": part(0, 0)})) as server:
        with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
            prefetch(AisStore(server.endpoint, "b", provider="aws"), ["a"], num_bytes=1)
        assert "the job 'job-1' goes on in the cluster: ais show job job-1; to end it: ais stop job-1" in caplog.text
        assert not [request for request in server.requests if request.startswith((b"DELETE", b"PUT"))]


def test_warm_in_cluster(small_shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shards and their indexes are fetched; in parts, if one is large."""
    run: Callable[..., int] = lambda *more: main(["cache", "warm", "s3://b/s-", "--in-cluster", *more])  # noqa: E731
    jobs = {"t": part(3, 1 << 20, runs=False)}
    with scripted(cluster(jobs, folder=small_shards)) as server:
        options = ["--endpoint", server.endpoint]
        assert run(*options, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["job"], found["num_objects"], found["num_shards"]) == ("job-1", 3, 4)
        assert run(*options, "--blob-threshold", "1KiB") == 0
        assert "fetched 3 of 8 objects, 1.0 MiB in" in capsys.readouterr().out
        asked = [json.loads(each.partition(b"\r\n\r\n")[2]) for each in server.requests if each.startswith(b"POST")]
    assert [each["value"]["blob-threshold"] for each in asked] == [0, 1024]
    assert asked[0]["value"]["objnames"][:2] == ["s-000000.tar", ".dali-pipes/s-000000.index.safetensors"]


def test_warm_needs_one_place(small_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--in-cluster", "--cache", str(tmp_path)]):
        assert main(["cache", "warm", str(small_shards), *more]) == 2
        assert "either --cache or --in-cluster" in capsys.readouterr().err
    for more in (["--etl", "x"], ["--cache-bytes", "1GiB"]):
        assert main(["cache", "warm", str(small_shards), "--in-cluster", *more]) == 2
        assert "--in-cluster takes neither --etl nor --cache-bytes" in capsys.readouterr().err
    assert main(["cache", "warm", "s3://b/s-", "--in-cluster"]) == 2
    assert "--in-cluster needs a cluster" in capsys.readouterr().err
    assert main(["cache", "warm", str(small_shards), "--in-cluster"]) == 2
    assert "is a directory, and only a bucket that AIStore has as a backend" in capsys.readouterr().err
