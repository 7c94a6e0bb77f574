"""Writers that are stopped, and several writers at a time: nothing is lost, and whoever loses is told."""

import contextlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.store.cluster import listing
from prep.sources.folders import imagefolder
from prep.versions.add import add
from tests.prep.versions.sets import Place, StoppedError, class_folders, copy_set, stopped_at
from tests.prep.versions.test_add import NEW_KEYS, OLD_KEYS

_DATES = re.compile(rb"20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z")


def add_more(place: Place, more: Path) -> Any:
    return place.add(more, jobs=1)


def remove_some(place: Place, _: Path) -> Any:
    return place.remove("cat/000", shards=["s-000002.tar"])


def compact_all(place: Place, _: Path) -> Any:
    return place.compact(jobs=1)


def drop_old(place: Place, _: Path) -> Any:
    return place.compact(drop_old=True, jobs=1)


def undated(objects: dict[str, bytes]) -> dict[str, bytes]:
    """All but dates, and claims that a writer left behind after it had created its object: nobody minds them."""
    names = [name for name in objects if name.partition(".claim-")[0] not in objects or ".claim-" not in name]
    return {name: _DATES.sub(b"", objects[name]) for name in names}


@pytest.mark.parametrize(
    ("place", "change"),
    [
        *(("directory", change) for change in (add_more, remove_some, compact_all, drop_old)),
        *(
            pytest.param("bucket", change, marks=pytest.mark.nightly)
            for change in (add_more, remove_some, compact_all, drop_old)
        ),
    ],
    indirect=["place"],
)
def test_a_writer_that_is_stopped_loses_nothing(
    place: Place, more: Path, tmp_path: Path, change: Callable[[Place, Path], Any]
) -> None:
    """Before each change of the store: the version before is whole, unless it is deleted, and the newest one always.

    The same command finishes what it began.
    """
    if change in (compact_all, drop_old):
        remove_some(place, more)
    version, keys = place.newest().manifest.version, place.keys()
    expected = copy_set(place, elsewhere(place, tmp_path, "expected"))
    change(expected, more)
    for number in range(100):
        tried = copy_set(place, elsewhere(place, tmp_path, f"tried{number}"))
        is_stopped = False
        with stopped_at(number):
            try:
                change(tried, more)
            except StoppedError:
                is_stopped = True
        if change is not drop_old:
            assert tried.keys(f"@{version}") == keys
        assert tried.keys() in (keys, expected.keys())
        change(tried, more)
        assert tried.keys() == expected.keys()
        assert undated(tried.objects()) == undated(expected.objects())
        if not is_stopped:
            break
    assert not is_stopped
    assert number > 3
    if change is drop_old:
        with pytest.raises(StoreError, match=r"no version 1 of .* \(found: 3\)"):
            expected.open("@1")


def elsewhere(place: Place, tmp_path: Path, name: str) -> Place:
    if place.endpoint is None:
        return Place(f"{tmp_path}/{name}/s-", None)
    bucket = place.url.removeprefix("ais://").partition("/")[0]
    return Place(f"ais://{bucket[:40]}{name}/s-", place.endpoint)


def test_of_two_writers_one_is_told(place: Place, more: Path, tmp_path: Path) -> None:
    """Both began with version 1. The second says so, keeps its shards, and needs only be run again."""
    other = class_folders(tmp_path / "other", {"owl": 1}, first=70)
    old = place.newest()
    add(imagefolder(more), old, command="dali-pipes prep add more")
    told = r"another command wrote version 2 of '.*' meanwhile: dali-pipes prep add more, 20.*run it again"
    with pytest.raises(StoreError, match=told):
        add(imagefolder(other), old)
    assert place.keys() == [*OLD_KEYS, *NEW_KEYS]
    report = place.add(other)
    assert report.packed is not None
    assert (report.version, report.packed.num_written) == (3, 0)
    assert place.keys() == [*OLD_KEYS, *NEW_KEYS, "owl/070"]


def test_many_writers_at_a_time_lose_nothing(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told or succeeds, and after as many attempts as it takes all samples are there, each once."""
    monkeypatch.setattr(listing, "LONGEST_PAUSE_S", 0.05)
    folders = [class_folders(tmp_path / f"new{number}", {"cat": 1}, first=100 + number) for number in range(4)]
    begin = Barrier(len(folders))

    def add_until_done(folder: Path) -> int:
        begin.wait(timeout=120)
        for _ in range(50):
            with contextlib.suppress(StoreError):
                return place.add(folder, jobs=1).version
        raise AssertionError("50 attempts")

    with ThreadPoolExecutor(len(folders)) as threads:
        versions = list(threads.map(add_until_done, folders))
    assert sorted(versions) == [2, 3, 4, 5]
    assert sorted(place.keys()) == sorted([*OLD_KEYS, *(f"cat/{100 + number}" for number in range(4))])
    assert [len(place.keys(f"@{version}")) for version in range(1, 6)] == [6, 7, 8, 9, 10]
