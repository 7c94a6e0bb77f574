"""A bucket of S3, Google Cloud Storage or Azure, or a folder of an HTTPS server, without an AIStore between.

`obstore` lists, signs, writes and deletes. It reads no object: our client reads what it has signed.
"""

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

from dali_pipes.errors import StoreError
from dali_pipes.store.base import SERVERS, RemoteStore
from dali_pipes.store.cloud.objects import ADDRESSES, CHAINS, CloudObjects, NoBucketError, Refusal, refused
from dali_pipes.store.cloud.settings import STALL_S, CloudSettings
from dali_pipes.store.http.answers import MissingObjectError, ObjectRequest
from dali_pipes.store.http.client import HttpAccess
from dali_pipes.store.http.objects import ObjectFetcher, RetryPolicy
from dali_pipes.store.patience import Patience, Waiting, current_patience, pause
from dali_pipes.store.shard_names import ObjectEntry

if TYPE_CHECKING:
    from dali_pipes.store.cloud.settings import ObstoreStore
    from dali_pipes.store.listings import Found

T = TypeVar("T")

WHOLE_BYTES = 16 << 20
"""An object of at most this size is written by one request, a larger one by parts of at least this size."""
# S3 takes 10,000 parts, and Azure 50,000.
_MAX_PARTS = 9_000
# An object's URL is asked for again long before it expires.
_SIGNED_FOR = timedelta(hours=1)
_USED_FOR_S = 45 * 60.0
# Where a machine in a cloud asks for its credentials. No other machine has such a server, and no wait mends that.
_METADATA_SERVERS = ("169.254.", "metadata.google")
_AZURE_VERSION = "2023-11-03"
_PAGE = 1000
# A page that is under way comes soon. A thread that comes out of `obstore` while Python ends aborts the process.
_LAST_PAGE_S = 2.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAKERS = {
    "s3": "aws s3 mb s3://{bucket}",
    "gs": "gcloud storage buckets create gs://{bucket}",
    "az": "az storage container create --name {bucket}",
}

# `obstore` answers no request in a child that is forked after it began: its threads stay in the parent.
_is_begun = False
_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = _is_begun


os.register_at_fork(after_in_child=_note_fork)


class BucketObjects(CloudObjects):
    """The objects of one bucket, and the requests of `obstore` for it.

    It does not know its store: in a circle, the connections of the store's reader would stay open.
    """

    def __init__(self, settings: CloudSettings, patience: Patience) -> None:
        self.settings, self.patience = settings, patience
        chain = CHAINS.get(settings.scheme)
        super().__init__(
            self.signed,
            locate=settings.locate,
            access=HttpAccess.of_cloud(settings.origin),
            service=settings.cloud,
            advice=f"credentials are looked for in this order: {chain}" if chain else "",
            address=ADDRESSES.get(settings.scheme, "check the URL"),
        )

    def send(self, where: str, request: Callable[[Any, "ObstoreStore"], T], *, asks_server: bool = True) -> T:
        """Send a request of `obstore` until it is done or refused, or the patience is at its end.

        Raises:
            FileExistsError: If it is refused because the object exists.
            StoreError: If it is refused; or in a process that was forked from one that used `obstore`.
        """
        global _is_begun
        if _is_forked:  # a request would wait forever
            raise StoreError(
                f"'{self.settings.url}' is used in a forked process, and its parent has used a cloud before; start the "
                "process by 'spawn' or 'forkserver' (multiprocessing_context= of torch's DataLoader)"
            )
        _is_begun = True
        store = self.settings.opened  # first: a missing package has an error of its own
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError

        origin = self.settings.origin
        waiting = Waiting(self.patience, origin, service=self.settings.cloud)
        while True:
            try:
                result = request(obstore, store)
            except AlreadyExistsError:
                self.has_answered = True
                raise FileExistsError(where) from None
            except (BaseError, FileNotFoundError) as exc:
                refusal = Refusal.of_error(exc)
                self.has_answered |= bool(refusal.status)
                is_unclear_again = refusal.is_unclear and waiting.num_failures > 0
                if refusal.is_passing or (not is_unclear_again and self.renews(refusal)):
                    if any(server in str(exc) for server in _METADATA_SERVERS):
                        raise StoreError(
                            f"no credentials for '{self.settings.url}'; they are looked for in this order: "
                            f"{CHAINS[self.settings.scheme]}"
                        ) from None
                    pause_s = waiting.next_pause_s(str(refusal), has_answered=self.has_answered)
                    if pause_s is not None:
                        pause(pause_s)
                        continue
                    if waiting.num_failures and not refusal.is_stale:
                        raise StoreError(f"'{where}' at {origin}: {waiting.over(str(refusal))}") from None
                raise refused(self.settings, where, refusal) from None
            except BaseException as exc:
                if type(exc).__name__ != "PanicException":  # raised if an answer claims more bytes than fit into memory
                    raise
                raise StoreError(f"'{where}' at {origin}: obstore cannot read the answer: {exc}") from None
            self.has_answered |= asks_server
            self.is_accepted |= asks_server
            waiting.progress()
            return result

    def signed(self, name: str) -> ObjectRequest:
        """The request that brings an object's bytes: a signed URL, or a plain one for public objects."""
        settings = self.settings
        if settings.is_anonymous:
            return ObjectRequest(settings.plain_url(name))
        url = _azure_url(settings, name) if settings.scheme == "az" else None
        if url is None:
            # Who pays (AWS_REQUEST_PAYER) is in the URL: S3 refuses fields x-amz-* that are not signed.
            sign: Any = lambda obstore, store: obstore.sign(store, "GET", name, _SIGNED_FOR)  # noqa: E731
            url = str(self.send(self.where(name), sign, asks_server=False))
        credentials = settings.credentials
        return ObjectRequest(url, expires_s=min(_USED_FOR_S, credentials.left_s) if credentials else _USED_FOR_S)

    def renews(self, refusal: Refusal) -> bool:
        credentials = self.settings.credentials
        if credentials is None or not (refusal.is_stale or refusal.is_unclear):
            return False
        credentials.renew(at_once=refusal.is_unclear)
        return self.is_accepted


class CloudStore(RemoteStore):
    """A bucket of a cloud, or a server's files. Any thread may use it."""

    def __init__(self, settings: CloudSettings, patience: Patience | None = None) -> None:
        self.settings = settings
        self.source = BucketObjects(settings, patience or current_patience())

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.settings, self.source.patience)

    @property
    def url(self) -> str:
        return self.settings.url

    def locate(self, name: str) -> str:
        return self.settings.locate(name)

    def exists(self) -> bool:
        if self._is_read_only:
            return True
        try:
            self.source.send(
                self.url, lambda obstore, store: next(self._pages(obstore.list(store, chunk_size=1)), None)
            )
        except NoBucketError:
            return False
        return True

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

        def entry(row: Any) -> ObjectEntry:
            ns = (row["last_modified"] - _EPOCH) // timedelta(microseconds=1) * 1000
            written_ns = (ns, ns) if self.settings.lists_times else None
            return ObjectEntry(name=row["path"], size=row["size"], checksum=None, written_ns=written_ns)

        def list_on(obstore: Any, store: "ObstoreStore") -> None:
            """Go on after the last page that came."""
            nonlocal position
            for page in self._pages(obstore.list(store, folder or None, offset=position, chunk_size=_PAGE), prefix):
                found.extend(entry(row) for row in page if row["path"].startswith(prefix))
                if not self.settings.is_sorted or not page:
                    continue
                position = max(row["path"] for row in page)
                if position > prefix and not position.startswith(prefix):
                    return

        self.source.send(self.locate(prefix), list_on)
        return found.finish()

    def _pages(self, pages: Iterator[Any], prefix: str = "") -> Iterator[Any]:
        """The pages of a listing of `obstore`, each got by a thread: Ctrl-C must end the wait.

        Raises:
            StoreError: If no page comes within the patience. `obstore` gives none to us while they have no objects.
        """
        limit_s = max(self.source.patience.patience_s, STALL_S)
        while True:
            came: Future[Any] = Future()
            threading.Thread(target=_get_page, args=(pages, came), name="dali-pipes-listing", daemon=True).start()
            try:
                is_there = bool(wait([came], limit_s).done)
            except BaseException:
                wait([came], _LAST_PAGE_S)
                raise
            if not is_there:
                raise StoreError(
                    f"'{self.locate(prefix)}' at {self.settings.origin}: its listing brought no object from there on "
                    f"in {limit_s:g} s"
                )
            if (page := came.result()) is None:
                return
            yield page

    def find_all(self, names: Sequence[str]) -> "Found":
        from dali_pipes.store.listings import Found

        if not self._is_read_only:
            return super().find_all(names)

        def entry(name: str) -> ObjectEntry | None:
            size = self.size(name)
            return None if size is None else ObjectEntry(name=name, size=size, checksum=None)

        return Found.of(list(map(entry, names)))

    def missing(self, name: str, exc: MissingObjectError) -> StoreError:
        what = f"bucket '{self.url}'" if exc.is_bucket else f"object '{self.locate(name)}'"
        return StoreError(f"no {what} at {self.settings.origin} ({exc.said})")

    @cached_property
    def objects(self) -> ObjectFetcher:
        return self.open_fetcher()

    def open_fetcher(self) -> ObjectFetcher:
        return ObjectFetcher(self.source, retry=RetryPolicy(silence_s=STALL_S), patience=self.source.patience)

    def write(self, name: str, data: bytes) -> None:
        self.write_stream(name, lambda: [memoryview(data)], num_bytes=len(data))

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """See `Store.write_stream`. The object appears when its last part is there; before, nothing is seen of it."""
        self._check_writable()
        errors: list[BaseException] = []

        def pieces() -> Iterator[bytes]:
            """The chunks, copied: a caller fills its buffer again. Its own errors come out of obstore as others."""
            num = 0
            try:
                for chunk in chunks():
                    num += chunk.nbytes
                    if num > num_bytes:
                        break
                    yield bytes(chunk)
                if num != num_bytes:
                    raise StoreError(
                        f"'{self.locate(name)}' is not written: expected {num_bytes} bytes, got {num} or more: did a "
                        "file change while it was read? run the command again"
                    )
            except GeneratorExit:
                raise
            except BaseException as exc:
                errors.append(exc)
                raise

        def put(obstore: Any, store: "ObstoreStore") -> None:
            if num_bytes <= WHOLE_BYTES:
                obstore.put(store, name, b"".join(pieces()), use_multipart=False)
                return
            part_bytes = max(WHOLE_BYTES, -(-num_bytes // _MAX_PARTS))
            obstore.put(store, name, pieces(), use_multipart=True, chunk_size=part_bytes, max_concurrency=2)

        try:
            self.source.send(self.locate(name), put)
        except StoreError:
            if errors:
                raise errors[0] from None
            raise

    def write_new(self, name: str, data: bytes, *, by: str) -> bool:
        """See `Store.write_new`; the server itself refuses a name that is taken (``If-None-Match: *``).

        A writer that finds its own bytes there has written them: an earlier attempt, whose answer was lost. So two jobs
        that write the same bytes both succeed.
        """
        self._check_writable()
        # Asked first, for servers that ignore the condition: there, only writers at the same time are not told.
        if (found := self.find(name)) is not None:
            return found == data
        try:
            self.source.send(
                self.locate(name),
                lambda obstore, store: obstore.put(store, name, data, mode="create", use_multipart=False),
            )
        except FileExistsError:
            return self.read(name) == data
        return True

    def size(self, name: str) -> int | None:
        with contextlib.suppress(MissingObjectError):
            path = self.settings.path(name)
            return int(self.source.send(self.locate(name), lambda obstore, store: obstore.head(store, path)["size"]))
        return None

    def delete(self, name: str) -> None:
        self._check_writable()
        with contextlib.suppress(MissingObjectError):
            self.source.send(self.locate(name), lambda obstore, store: obstore.delete(store, name))

    @property
    def _is_read_only(self) -> bool:
        return self.settings.scheme in SERVERS

    def _check_writable(self) -> None:
        if self._is_read_only:
            raise StoreError(f"'{self.url}' is read by {self.settings.scheme}://, which writes nothing")


def _just_before(prefix: str) -> str:
    """A name that sorts before all names that start with ``prefix``, and after most others.

    >>> _just_before("train-") < "train-" < "train-0"
    True
    """
    last = ord(prefix[-1])
    return f"{prefix[:-1]}{chr(last - 1)}~" if ord("!") < last < 128 else prefix[:-1]


def _azure_url(settings: CloudSettings, name: str) -> str | None:
    """The URL that brings an object's bytes; ``None`` if `obstore` signs it, as it does without an account's key.

    Raises:
        StoreError: If the key is not base64, or there is none and `obstore` would sign the name wrongly.
    """
    options, plain = settings.options, settings.plain_url(name)
    if sas := options.get("azure_storage_sas_token") or options.get("azure_storage_sas_key"):
        return f"{plain}?{sas.lstrip('?')}"
    key = options.get("azure_storage_account_key") or options.get("azure_storage_access_key")
    account = options.get("azure_storage_account_name")
    if not (key and account):
        if quote(name, safe="/-_.~") == name:
            return None
        # obstore signs the quoted name, and Azure checks the plain one.
        raise StoreError(
            f"'{settings.url}/{name}': a name with spaces, signs or letters beyond ASCII can be read with "
            "an account's key or an access signature only; set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, "
            "or rename the object"
        )
    until = (datetime.now(UTC) + _SIGNED_FOR).strftime("%Y-%m-%dT%H:%M:%SZ")
    blob = f"/blob/{account}/{settings.bucket}/{name}"
    # Rights, start, end, blob, policy, address, protocol, version, kind; then seven fields that are not used.
    text = "\n".join(["r", "", until, blob, "", "", "", _AZURE_VERSION, "b", *[""] * 7])
    try:
        digest = hmac.new(base64.b64decode(key, validate=True), text.encode(), hashlib.sha256).digest()
    except binascii.Error:
        raise StoreError(f"cannot sign for '{settings.url}': the account's key is not base64") from None
    signature = base64.b64encode(digest).decode()
    return f"{plain}?{urlencode({'sp': 'r', 'se': until, 'sv': _AZURE_VERSION, 'sr': 'b', 'sig': signature})}"


@lru_cache(maxsize=8)
def _reopen(settings: CloudSettings, patience: Patience) -> CloudStore:
    """Open a store once in a process that unpickles it for each task."""
    return CloudStore(settings, patience)


def open_bucket(scheme: str, bucket: str) -> CloudStore:
    """The bucket of a cloud, or a server's files, with the settings of the environment."""
    return CloudStore(CloudSettings.from_environment(scheme, bucket))


def _get_page(pages: Iterator[Any], came: "Future[Any]") -> None:
    try:
        came.set_result(next(pages, None))
    except BaseException as exc:  # noqa: BLE001 (who waits raises it; some of `obstore`'s are no `Exception`)
        came.set_exception(exc)
