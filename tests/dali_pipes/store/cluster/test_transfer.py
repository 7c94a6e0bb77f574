"""Streams to a bucket and back: who is sent the body, what is tried again, what is told."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.errors import DataError, StoreError
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.patience import Patience, use_patience
from prep.embedded.connection import Headers
from prep.embedded.server import Handler as RoutesHandler
from prep.embedded.server import NodeServer
from prep.embedded.storage import Storage

DATA = bytes(range(256)) * 32_000  # 8 MB: more than a socket's buffer holds


class _Seen:
    """What a server met, and how it is to behave."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, bool]] = []
        """Of each PUT: "proxy" or "target", the announced length, whether the body was held back."""
        self.fail_first = 0
        """So many target PUTs are cut off in the middle."""
        self.refuse_first = 0
        """So many are answered 503."""
        self.wrong_checksum = False
        self.is_flat = False
        """No redirect: the proxy stores itself."""


@pytest.fixture
def seen() -> _Seen:
    return _Seen()


@pytest.fixture
def access(seen: _Seen, tmp_path: Path) -> Iterator[AisStore]:
    """A bucket of a real node in this process, which can be made to misbehave."""

    class Handler(RoutesHandler):
        def _announced(self) -> tuple[int, bool]:
            return int(self.headers.get("content-length", "0")), "expect" in self.headers

        def _redirect(self) -> None:
            if self.command == "PUT":
                seen.asked.append(("proxy", *self._announced()))
                if seen.is_flat:
                    super()._put("b", "x.tar")
                    return
            super()._redirect()

        def _put(self, bucket: str, name: str) -> None:
            seen.asked.append(("target", *self._announced()))
            if seen.fail_first:
                seen.fail_first -= 1
                next(iter(self.body_chunks()))
                raise ConnectionResetError
            if seen.refuse_first:
                seen.refuse_first -= 1
                for _ in self.body_chunks():
                    pass
                self.answer(503, b'{"message": "busy"}')
                return
            super()._put(bucket, name)

        def answer(self, status: int, body: bytes = b"", *, headers: Headers = (), **options: Any) -> None:
            if seen.wrong_checksum and self.command == "PUT":
                headers = [(key, "0" * 16 if key == "Ais-Checksum-Value" else value) for key, value in headers]
            super().answer(status, body, headers=headers, **options)

    with Storage(tmp_path / "node") as storage, NodeServer(storage, port=0) as server:
        server.RequestHandlerClass = Handler
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        store = AisStore(server.endpoint, "b")
        store.create()
        yield store.access()
        server.shutdown()
        thread.join()


def _chunks() -> Iterator[memoryview]:
    view = memoryview(DATA)
    for start in range(0, len(DATA), 1 << 20):
        yield view[start : start + (1 << 20)]


def _read(access: AisStore, name: str) -> bytes:
    return AisStore(access.endpoint, access.bucket).read(name)


def test_write_stream_to_what_does_not_redirect_stores_there(
    access: AisStore, seen: _Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the body that was held back, and gets it with the next request; never an empty object."""
    monkeypatch.setattr("dali_pipes.store.cluster.ais.HEAD_TIMEOUT_S", 0.3)
    seen.is_flat = True
    with pytest.raises(StoreError, match="no object"):
        _read(access, "x.tar")
    access.write_stream("x.tar", _chunks, num_bytes=len(DATA))
    assert seen.asked[-1] == ("proxy", len(DATA), False)
    seen.is_flat = False
    assert _read(access, "x.tar") == DATA


@pytest.mark.parametrize("fault", ["fail_first", "refuse_first"])
def test_write_stream_that_broke_is_sent_again_whole(access: AisStore, seen: _Seen, fault: str) -> None:
    setattr(seen, fault, 2)
    access.write_stream("x.tar", _chunks, num_bytes=len(DATA))
    assert [who for who, _, _ in seen.asked] == ["proxy", "target"] * 3
    assert _read(access, "x.tar") == DATA


@pytest.mark.parametrize(
    ("fault", "value", "message"),
    [
        (
            "refuse_first",
            1_000_000,
            "given up after .* attempts in .* s .*, the last one: 503 busy; is the cluster well",
        ),
        ("fail_first", 1_000_000, r"given up after .* attempts in .*, the last one: the transfer broke \("),
        (
            "wrong_checksum",
            True,
            "given up after 4 attempts, the last one: the target stored bytes with the xxhash2 0{16}, but [0-9a-f]{16} "
            "was sent",
        ),
    ],
)
def test_write_stream_that_keeps_failing_says_what_and_where(
    access: AisStore, seen: _Seen, fault: str, value: object, message: str
) -> None:
    setattr(seen, fault, value)
    patience_s = 3600 if fault == "wrong_checksum" else 0.2  # a wrong checksum is tried four times, for any time
    with (
        use_patience(Patience(patience_s=patience_s, longest_pause_s=0.01)),
        pytest.raises(StoreError, match=rf"'ais://b/x.tar' at {access.endpoint}: {message}"),
    ):
        AisStore(access.endpoint, "b").access().write_stream("x.tar", _chunks, num_bytes=len(DATA))
    with pytest.raises(StoreError, match="no object"):
        _read(access, "x.tar")


def test_write_stream_whose_source_fails_stores_nothing(access: AisStore) -> None:
    """The source's error is raised unchanged, and the next object can be written."""

    def broken() -> Iterator[memoryview]:
        yield next(_chunks())
        raise DataError("a source changed")

    with pytest.raises(DataError, match="a source changed"):
        access.write_stream("x.tar", broken, num_bytes=len(DATA))
    with pytest.raises(StoreError, match="no object"):
        _read(access, "x.tar")
    access.write_stream("y.tar", _chunks, num_bytes=len(DATA))
    assert _read(access, "y.tar") == DATA


def test_transfer_that_cannot_be_is_told_at_once(
    access: AisStore, seen: _Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bucket, no body is sent. If a file cannot be read, the transfer fails without a wait."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=rf"no bucket 'ais://none' at {access.endpoint}; `dali-pipes prep pack` makes"):
        AisStore(access.endpoint, "none").upload("x", tmp_path / "file")
    gone = AisStore(access.endpoint, "gone")
    gone.create()
    gone.client.bucket("gone").delete()
    monkeypatch.setattr(AisStore, "access", lambda self: self)
    where = rf"'ais://gone/x.tar' at {access.endpoint}"
    with pytest.raises(StoreError, match=rf'{where}: 404 bucket "ais://gone" does not exist'):
        gone.write_stream("x.tar", _chunks, num_bytes=len(DATA))
    assert seen.asked == []  # no target was named, and no body sent
    for path, cause in (("/proc/self/mem", "Input/output error"), (f"{tmp_path}/gone", "No such file")):
        with pytest.raises(StoreError, match=rf"cannot read '{path}': {cause}"):
            access.upload("x", Path(path))
