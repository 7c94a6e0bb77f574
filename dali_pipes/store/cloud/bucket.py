"""A bucket of S3, Google Cloud Storage or Azure, or a folder of an HTTPS server, without an AIStore between.

`obstore` lists, signs, writes and deletes. It reads no object: our client reads what it has signed.
"""

import builtins
import contextlib
import io
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from dali_pipes.errors import StoreError
from dali_pipes.store.base import Store
from dali_pipes.store.cloud.client import CloudClient, NoBucketError
from dali_pipes.store.cloud.settings import CloudSettings
from dali_pipes.store.entries import SERVERS, ObjectEntry
from dali_pipes.store.http.answers import MissingObjectError
from dali_pipes.store.http.objects import ObjectFetcher
from dali_pipes.store.patience import current_patience
from dali_pipes.store.shard_names import check_object_name

if TYPE_CHECKING:
    from dali_pipes.store.listings import Found

_BUFFER_BYTES = 1 << 20
_PAGE = 1000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class CloudStore(Store):
    """A bucket of a cloud. ``settings`` say how it is reached."""

    def __init__(self, settings: CloudSettings) -> None:
        self.settings = settings
        self._client = CloudClient(settings, current_patience())

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._client,)

    @property
    def url(self) -> str:
        return self.settings.url

    def locate(self, name: str) -> str:
        return f"{self.url}/{name}"

    def check_name(self, name: str) -> None:
        check_object_name(name, url=self.locate(name))

    def exists(self) -> bool:
        if self._is_read_only:
            return True
        try:
            self._list_some()
        except NoBucketError:
            return False
        return True

    def _list_some(self) -> None:
        import obstore

        self._client.send(self.url, lambda: next(iter(obstore.list(self._client.store, chunk_size=1)), None))

    def create(self) -> None:
        """Check that the bucket exists: where it is, who may read it and who pays is decided when it is made.

        Raises:
            StoreError: If there is no such bucket.
        """
        self._check_writable()
        if not self.exists():
            raise StoreError(
                f"no bucket '{self.url}' at {self.settings.origin}; make it first, with its region and rights: "
                f"{_MAKERS[self.settings.scheme].format(bucket=self.settings.bucket)}"
            )

    def list(self, prefix: str) -> Sequence[ObjectEntry]:
        import obstore

        from dali_pipes.store.listings import EntriesBuilder

        if self._is_read_only:
            raise StoreError(
                f"'{self.locate(prefix)}': a server of {self.settings.scheme}:// lists nothing; name the shards "
                "(NAME-{000000..000009}.tar), or the prefix of a data set that has a manifest"
            )
        # obstore takes a prefix for a folder. So the folder is listed, from the prefix on and no further than it.
        folder, slash, _ = prefix.rpartition("/")
        position = _just_before(prefix) if prefix != folder + slash and self.settings.is_sorted else None
        found = EntriesBuilder(self.locate(prefix))

        def list_on() -> None:
            """Go on after the last page that came."""
            nonlocal position
            for page in obstore.list(self._client.store, folder or None, offset=position, chunk_size=_PAGE):
                found.extend(
                    ObjectEntry(
                        name=row["path"],
                        size=row["size"],
                        checksum=None,
                        written_ns=_written_ns(row["last_modified"]) if self.settings.lists_times else None,
                    )
                    for row in page
                    if row["path"].startswith(prefix)
                )
                if not self.settings.is_sorted or not page:
                    continue
                position = max(row["path"] for row in page)
                if position > prefix and not position.startswith(prefix):
                    return

        self._client.send(self.locate(prefix), list_on)
        return found.finish()

    def find_all(self, names: Sequence[str], *more: Sequence[str]) -> "builtins.list[Found]":
        from dali_pipes.store.listings import Found

        if not self._is_read_only:
            return super().find_all(names, *more)
        return [Found.of([self._entry(name) for name in each]) for each in (names, *more)]

    def _entry(self, name: str) -> ObjectEntry | None:
        size = self.size(name)
        return None if size is None else ObjectEntry(name=name, size=size, checksum=None)

    def read(self, name: str) -> bytes:
        with self._reading(name):
            return self._client.objects.read(name)

    def find(self, name: str) -> bytes | None:
        try:
            return self._client.objects.read(name)
        except MissingObjectError:
            return None

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        with self._reading(name):
            return self._client.objects.read(name, start=start, size=size) if size else b""

    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        with self._reading(name):
            return cast("BinaryIO", io.BufferedReader(self._client.objects.open(name), _BUFFER_BYTES))

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except MissingObjectError as exc:
            what = f"bucket '{self.url}'" if exc.is_bucket else f"object '{self.locate(name)}'"
            raise StoreError(f"no {what} at {self.settings.origin} ({exc.said})") from None

    def write(self, name: str, data: bytes) -> None:
        self.access().write_stream(name, lambda: [memoryview(data)], num_bytes=len(data))

    def write_new(self, name: str, data: bytes, *, by: str) -> bool:
        """See `Store.write_new`; the server itself refuses a name that is taken (``If-None-Match: *``).

        A writer that finds its own bytes there has written them: an earlier attempt, whose answer was lost. So two jobs
        that write the same bytes both succeed.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        self._check_writable()
        # Asked first, for servers that ignore the condition: there, only writers at the same time are not told.
        if (found := self.find(name)) is not None:
            return found == data
        with self._client.asking(self.locate(name)):
            try:
                self._client.attempt(
                    lambda: obstore.put(self._client.store, name, data, mode="create", use_multipart=False)
                )
            except AlreadyExistsError:
                return self.read(name) == data
        return True

    def size(self, name: str) -> int | None:
        import obstore

        found = self._client.find(self.locate(name), lambda: obstore.head(self._client.store, name))
        return None if found is None else int(found["size"])

    def delete(self, name: str) -> None:
        import obstore

        self._check_writable()
        self._client.find(self.locate(name), lambda: obstore.delete(self._client.store, name))

    def access(self) -> CloudClient:
        return self._client

    def open_fetcher(self) -> ObjectFetcher:
        return self._client.open_fetcher()

    @property
    def _is_read_only(self) -> bool:
        return self.settings.scheme in SERVERS

    def _check_writable(self) -> None:
        if self._is_read_only:
            raise StoreError(f"'{self.url}' is read by {self.settings.scheme}://, which writes nothing")


_MAKERS = {
    "s3": "aws s3 mb s3://{bucket}",
    "gs": "gcloud storage buckets create gs://{bucket}",
    "az": "az storage container create --name {bucket}",
}


def _just_before(prefix: str) -> str:
    """A name that sorts before all names that start with ``prefix``, and after most others.

    >>> _just_before("train-") < "train-" < "train-0"
    True
    """
    last = ord(prefix[-1])
    return f"{prefix[:-1]}{chr(last - 1)}~" if ord("!") < last < 128 else prefix[:-1]


@lru_cache(maxsize=8)
def _reopen(client: CloudClient) -> CloudStore:
    store = CloudStore.__new__(CloudStore)
    store.settings, store._client = client.settings, client
    return store


def _written_ns(time: datetime) -> tuple[int, int]:
    ns = (time - _EPOCH) // timedelta(microseconds=1) * 1000
    return ns, ns


def open_bucket(scheme: str, bucket: str) -> CloudStore:
    """The bucket of a cloud, or a server's files, with the settings of the environment."""
    return CloudStore(CloudSettings.from_environment(scheme, bucket))
