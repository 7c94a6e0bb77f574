"""A second copy of what is packed: the same bytes, whole or not at all, and finished by running it again."""

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.base import Store
from dali_pipes.store.local import LocalStore
from prep.pack.target import CopiedTarget
from prep.sources.record import Record, Source
from tests.programs import start_python
from tests.shards import contents_of, encode_photo, files_of, make_source, pack


def _contents(store: Store) -> dict[str, bytes]:
    return contents_of(store, "a/")


def _pack(store: Store, copy: Path, *, count: int = 10, seed: int = 0, overwrite: bool = False) -> tuple[int, int]:
    source = make_source(count, seed=seed)
    report = pack(source, store=store, prefix="a/x-", max_count=4, copy=copy, overwrite=overwrite, jobs=2)
    assert report.copy == str(copy)
    return report.num_written, report.num_copied


def test_copy_that_is_run_again_has_what_was_lacking_written_where_it_was(store: Store, tmp_path: Path) -> None:
    """Nothing twice; what one side lost, to that side alone; a copy that is asked for later."""
    assert pack(make_source(10), store=store, prefix="a/x-", max_count=4).num_written == 3
    copy = tmp_path / "copy"
    assert _pack(store, copy) == (0, 3)
    assert _pack(store, copy) == (0, 0)
    store.delete("a/x-000001.tar")
    (copy / "a" / "x-000001.tar").unlink()
    (copy / "a" / "x-000002.tar").unlink()
    before = (copy / "a" / "x-000000.tar").stat()
    assert _pack(store, copy) == (1, 2)
    assert (copy / "a" / "x-000000.tar").stat() == before
    assert _contents(LocalStore(copy)) == _contents(store)


def test_copy_that_has_no_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, copy = LocalStore(tmp_path / "out"), tmp_path / "copy"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(StoreError, match=r"copy' has 10000 bytes free, the copy takes 20480 more; name another"):
        pack(make_source(3), store=store, copy=copy)
    assert not copy.exists()
    assert not list(tmp_path.rglob("*.tar"))


def test_copy_of_a_pack_that_fails_leaves_no_part(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source file that grows: neither side has the shard, and nothing is left but the record of what is missing."""
    path = tmp_path / "a.jpg"
    path.write_bytes(encode_photo())
    source = Source(name="s", records=[Record(key="a", components={"jpg": path}, label=0)], classes={})
    monkeypatch.setattr("prep.pack.target.Target.find_stale", lambda *_: path.write_bytes(b"\xff\xd8\xff" * 900_000))
    with pytest.raises(DataError, match="source files changed"):
        pack(source, store=store, copy=tmp_path / "copy")
    assert list(contents_of(store)) == [".dali-pipes/samples-written.json"]
    assert list(files_of(tmp_path / "copy")) == [".dali-pipes/samples-written.json"]


class _Store:
    """A store that breaks off and tries again, and then takes half."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        next(iter(chunks()))
        if self._fails:
            raise StoreError("no more room in the bucket")
        self.received = b"".join(map(bytes, chunks()))


def test_copy_is_that_of_the_last_attempt_or_none(tmp_path: Path) -> None:
    """A copy that is there is replaced only when all is."""
    pieces = [b"one", b"two" * 50_000, b"three"]
    options: dict[str, Any] = {"num_bytes": sum(map(len, pieces))}
    for fails, expected in ((False, b"".join(pieces)), (True, b"before")):
        (tmp_path / "x.tar").write_bytes(b"before")
        target = CopiedTarget(target=_Store(fails=fails), directory=tmp_path)
        with pytest.raises(StoreError, match="no more room") if fails else contextlib.nullcontext():
            target.write_stream("x.tar", lambda: map(memoryview, pieces), **options)
        assert (tmp_path / "x.tar").read_bytes() == expected
        assert [path.name for path in tmp_path.iterdir()] == ["x.tar"]


COPY = """
import os, resource, signal, sys
from pathlib import Path
from prep.pack.target import CopiedTarget
from dali_pipes.store.local import LocalStore

class Killed:
    def write_stream(self, name, chunks, *, num_bytes):
        for number, _ in enumerate(chunks()):
            if number == 4:
                os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
if sys.argv[2] == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, 1 << 21))
target = Killed() if sys.argv[2] == "killed" else LocalStore(Path(f"{folder}-store"))  # it names itself in its errors
pieces = [memoryview(bytes(1 << 20))] * 9
CopiedTarget(target=target, directory=folder).write_stream("x.tar", lambda: iter(pieces), num_bytes=9 << 20)
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("killed", -signal.SIGKILL, ""),  # no cleanup code can run
        ("full", 1, "StoreError: cannot write the copy '{}/x.tar': File too large\n"),
    ],
)
def test_copied_target_that_is_killed_or_finds_no_room_leaves_nothing(
    tmp_path: Path, end: str, code: int, said: str
) -> None:
    process = start_python(COPY, tmp_path, end)
    assert process.communicate(timeout=300)[1].endswith(said.format(tmp_path))
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []
