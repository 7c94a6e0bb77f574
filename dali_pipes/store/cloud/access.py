"""A worker process's access to a cloud's bucket: whole objects by parts, and ranges of objects. It pickles."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dali_pipes.errors import StoreError
from dali_pipes.store.base import StoredFile
from dali_pipes.store.cloud.client import CloudClient
from dali_pipes.store.entries import SERVERS, ObjectEntry
from dali_pipes.store.patience import Waiting

WHOLE_BYTES = 16 << 20
"""An object of at most this size is written by one request, a larger one by parts of at least this size."""
# S3 takes 10,000 parts, and Azure 50,000.
_MAX_PARTS = 9_000
# What one range brings, and what waits in memory.
_RANGE_BYTES = 8 << 20


def part_bytes(num_bytes: int) -> int:
    """The size of the parts of an object of ``num_bytes``.

    >>> part_bytes(1 << 30) >> 20
    16
    """
    return max(WHOLE_BYTES, -(-num_bytes // _MAX_PARTS))


class CloudBucketAccess:
    """See `dali_pipes.store.base.StoreAccess`."""

    def __init__(self, client: CloudClient) -> None:
        self._client = client
        self._settings = client.settings

    def __reduce__(self) -> tuple[Any, ...]:
        return CloudBucketAccess, (self._client,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CloudBucketAccess) and self._settings == other._settings

    def __hash__(self) -> int:
        return hash((self._settings.scheme, self._settings.bucket))

    def locate(self, name: str) -> str:
        return f"{self._settings.url}/{name}"

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """See `StoreAccess`. The object appears when its last part is there; before, nothing is seen of it."""
        import obstore

        where = self.locate(name)
        if self._settings.scheme in SERVERS:
            raise StoreError(f"'{where}' is read by {self._settings.scheme}://, which writes nothing")
        failed: list[BaseException] = []

        def put() -> None:
            # Copied: a caller fills its buffer again. Errors of the caller's own pass through obstore as they are.
            pieces = (bytes(chunk) for chunk in _noting(_counted(chunks(), where, num_bytes), failed))
            if num_bytes <= WHOLE_BYTES:
                obstore.put(self._client.store, name, b"".join(pieces), use_multipart=False)
            else:
                obstore.put(
                    self._client.store, name, pieces, use_multipart=True, chunk_size=part_bytes(num_bytes),
                    max_concurrency=2,
                )  # fmt: skip

        try:
            self._client.send(where, put)
        except StoreError:
            if failed:
                raise failed[0] from None
            raise

    def file(self, name: str, *, size: int) -> "CloudFile":
        """See `StoreAccess`."""
        return CloudFile(self, name, size)

    def known_checksum(self, entry: ObjectEntry) -> None:
        """See `StoreAccess`: a listing has no checksum of the bytes. An ETag is none, if the object has parts."""
        return

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        """The object's bytes ``[start, start + size)``; fewer if the object ends before."""
        return self._read(name, start=start, size=size, waiting=None)

    def _read(self, name: str, *, start: int, size: int, waiting: Waiting | None) -> bytes:
        import obstore

        from dali_pipes.store.cloud.errors import refusal_of

        if not size:
            return b""
        client = self._client

        def get() -> bytes:
            from obstore.exceptions import BaseError

            try:
                return obstore.get_range(client.store, name, start=start, length=size).to_bytes()
            except BaseError as exc:
                if refusal_of(exc).status == 416:
                    return b""  # it ends before
                raise

        client.store  # noqa: B018 (opened first: a missing package has an error of its own)
        with client.asking(self.locate(name)):
            return client.attempt(get, waiting)


class CloudFile(StoredFile):
    """An object of ``size`` bytes of a cloud's bucket, read by ranges of some MiB."""

    def __init__(self, access: CloudBucketAccess, name: str, size: int) -> None:
        self._access, self._name, self._size = access, name, size
        self._start, self._block = 0, b""

    @property
    def url(self) -> str:
        return self._access.locate(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return CloudFile, (self._access, self._name, self._size)

    def read_into(self, view: memoryview, *, offset: int) -> int:
        """Read into ``view`` and return the number of bytes: at least one, or 0 at the object's end."""
        if offset >= self._size or not view:
            return 0
        if not self._start <= offset < self._start + len(self._block):
            size = min(max(_RANGE_BYTES, len(view)), self._size - offset)
            self._start, self._block = offset, self._access.read_range(self._name, start=offset, size=size)
            if not self._block:
                raise StoreError(f"'{self.url}' was replaced while it was read; run the command again")
        skipped = offset - self._start
        num = min(len(view), len(self._block) - skipped)
        view[:num] = self._block[skipped : skipped + num]
        return num

    def close(self) -> None:
        """Forget what was read ahead. Can be called twice."""
        self._start, self._block = 0, b""


def _counted(chunks: Iterable[memoryview], where: str, num_bytes: int) -> Iterator[memoryview]:
    """The chunks; a `StoreError` if they are not ``num_bytes`` together, before the object is there."""
    num = 0
    for chunk in chunks:
        num += chunk.nbytes
        if num > num_bytes:
            break
        yield chunk
    if num != num_bytes:
        found = f"more than {num_bytes}" if num > num_bytes else str(num)
        raise StoreError(
            f"'{where}' is not written: expected {num_bytes} bytes, got {found}: did a file change while it was read? "
            "run the command again"
        )


def _noting(chunks: Iterable[memoryview], failed: list[BaseException]) -> Iterator[memoryview]:
    try:
        yield from chunks
    except GeneratorExit:
        raise
    except BaseException as exc:
        failed.append(exc)
        raise
