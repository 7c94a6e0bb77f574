"""A loader's first requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import dali_pipes as dp
from dali_pipes.errors import DataError
from tests.servers.scripted import ScriptedServer, Visit, scripted

LATE_S = 60.0
"""Nobody waits so long, unless one request waits for another."""


@contextmanager
def bucket_of(folder: Path, before: Callable[[str], int | None]) -> Iterator[ScriptedServer]:
    """Serve the bucket ``b``. ``before`` gets the path of each request; if it returns a status, that is the answer."""

    def act(visit: Visit) -> None:
        path = urlsplit(visit.path).path
        file = folder / path.removeprefix("/v1/objects/b/")
        status = before(path)
        if status is not None:
            visit.say(status, b"{}")
        elif path == "/v1/health":
            visit.say(200, b"", **{"Ais-Node-Id": "p"})
        elif file.is_file():
            visit.say(200, file.read_bytes())
        else:
            visit.say(404, b'{"message": "does not exist"}')

    with scripted(act) as server:
        yield server


def open_loader(endpoint: str, cache: Path, *, urls: str = "ais://b/s-", **options: object) -> dp.Loader:
    graph = dp.segmentation(crop=32, photo="image.jpg", mask="trimap.png")
    return dp.loader(
        urls, graph, batch_size=4, device="cpu", endpoint=endpoint,
        cache=dp.Cache(directory=cache, fetchers=2, **options),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("urls", ["ais://b/s-", "ais://b/s-{000000..000003}.tar"])
def test_first_shards_are_asked_for_side_by_side(small_shards: Path, tmp_path: Path, urls: str) -> None:
    """Shards wait neither for the graph's example, nor for each other."""
    together = {"/v1/objects/b/s-000000.index.safetensors", *(f"/v1/objects/b/s-00000{n}.tar" for n in range(4))}
    asked: set[str] = set()
    changed = threading.Condition()
    late: list[str] = []

    def before(path: str) -> None:
        others = together if path in together else set()
        with changed:
            asked.add(path)
            changed.notify_all()
            if not changed.wait_for(lambda: others <= asked, LATE_S):
                late.append(f"{path} waited for {sorted(others - asked)}")

    with bucket_of(small_shards, before) as server, open_loader(server.endpoint, tmp_path, urls=urls) as loader:
        assert sum(len(batch["image"]) for (batch,) in loader) == loader.num_samples
    assert not late


def test_refused_graph_ends_the_fetches_that_have_begun(small_shards: Path, tmp_path: Path) -> None:
    """No thread, and no shard that is being filled, is left."""
    with bucket_of(small_shards, lambda path: None) as server:
        with pytest.raises(DataError, match=r"component 'depth\.png'"):
            dp.loader(
                "ais://b/s-", lambda components, random: {"depth": components["depth.png"]},
                batch_size=4, device="cpu", endpoint=server.endpoint, cache=dp.Cache(directory=tmp_path),
            )  # fmt: skip
        assert not [thread for thread in threading.enumerate() if thread.name == "dali-pipes-fetch"]
        with open_loader(server.endpoint, tmp_path) as loader:
            assert sum(len(batch["image"]) for (batch,) in loader) == loader.num_samples


def test_example_of_the_graph_is_read_once(small_shards: Path, tmp_path: Path) -> None:
    """Whether the graph decides which samples are left out, or not; the stager reads each index once more."""
    for missing in ("error", "skip"):
        asked: list[str] = []
        cache = tmp_path / missing
        cache.mkdir()
        with (
            bucket_of(small_shards, asked.append) as server,
            dp.loader(
                "ais://b/s-", dp.segmentation(crop=32, photo="image.jpg", mask="trimap.png"),
                batch_size=4, device="cpu", endpoint=server.endpoint,
                cache=dp.Cache(directory=cache), select=dp.Select(missing=missing),
            ) as loader,
        ):  # fmt: skip
            assert sum(len(batch["image"]) for (batch,) in loader) == loader.num_samples
        assert asked.count("/v1/objects/b/s-000000.index.safetensors") == 2
