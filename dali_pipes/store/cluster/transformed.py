"""Show a bucket as an ETL transforms it: reading a shard gives the transformed shard.

Code that indexes, stages or repairs shards need not know about ETLs. It asks for ``x-000000.tar`` and gets the shard
that the ETL makes of the stored one. It asks for ``x-manifest.safetensors`` and gets the manifest of the transformed
shards, which lies beside the other manifest as ``x-manifest.NAME.etl.safetensors``, in ``.dali-pipes/``. Both share one
class table.

The size and the checksum of a transformed shard are unknown until it was read. An ETL sends a shard whole, from the
first byte, whatever range is asked for, mostly without its length, and without a checksum. So each attempt starts
again. When a pod breaks off, AIStore has sent status 200 already; it adds the text of its error to the body and ends
the body properly. So a wrong body counts as a broken transfer as long as it can be one. If it cannot be one, the
transform gives other bytes than when the shards were indexed.
"""

import contextlib
import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from dali_pipes.errors import DataError, StoreError, shown
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.formats.names import transformed_name
from dali_pipes.store.base import Bucket, Store
from dali_pipes.store.cluster.access import ClusterAccess
from dali_pipes.store.cluster.client import NotAisError, RefusedError
from dali_pipes.store.cluster.objects import StoredObjects, refusal_text
from dali_pipes.store.http.answers import MAX_OBJECT_BYTES, FaultError, ObjectPart, ObjectRequest
from dali_pipes.store.http.objects import ObjectFetcher, ObjectFile, RetryPolicy
from dali_pipes.store.http.rules import message_of
from dali_pipes.store.http.wire import Answer
from dali_pipes.store.shard_names import ObjectEntry
from dali_pipes.store.shard_set import ShardSet

if TYPE_CHECKING:
    from dali_pipes.store.listings import Found

_log = logging.getLogger(__name__)

SILENCE_S = 300.0
"""No byte comes before the transform is done. AIStore ends a transform after the ETL's ``obj_timeout``."""
_DESCRIBES = ".safetensors"
# Class tables lie there too, but their names do not contain an ETL's.
_CLASSES = ".json"
_BLOCK_BYTES = 1 << 20
# The stage of an ETL that can be read through.
_RUNNING = "Running"
_ETL_NAME = re.compile(r"(?=.{6,32}$)[a-z0-9][a-z0-9-]*[a-z0-9]")


class NoEtlError(StoreError):
    """The cluster cannot run any ETL."""


def check_running(store: Bucket, name: str) -> None:
    """Refuse an ETL that is missing, or does not run, before anything is read through it.

    ``store`` is any bucket of the cluster. If the cluster lists its ETLs to administrators only, nothing is refused,
    and the first read will fail.

    Raises:
        NoEtlError: If the cluster cannot have ETLs.
        StoreError: If the ETL does not run; names the ETLs that run.
        ValueError: If the name is not valid.
    """
    if not _ETL_NAME.fullmatch(name):
        raise ValueError(f"an ETL's name is 6 to 32 lower-case letters, digits and dashes, got '{name}'")
    with asking_etl(store, name):
        try:
            listed = store.requests.json("etl")
        except RefusedError as exc:
            if exc.status in (401, 403):
                _log.debug("ETL '%s': not known before it is used, %s does not list them", name, store.endpoint)
                return
            raise
        try:
            stages = {str(etl["id"]): str(etl["stage"]) for etl in listed or ()}
        except (LookupError, TypeError):
            raise NotAisError("this is no list of ETLs") from None
    if stages.get(name) == _RUNNING:
        return
    others = sorted(other for other, stage in stages.items() if stage == _RUNNING)
    found = f"found: {shown(others)}" if others else "none runs"
    if name in stages:
        what = f"ETL '{name}' at {store.endpoint} does not run, its stage is {stages[name]} ({found}); stop it and "
    else:
        what = f"no ETL '{name}' at {store.endpoint} ({found}); "
    raise StoreError(f"{what}{how_to_start(name)}")


def how_to_start(name: str) -> str:
    return f"start it: dali-pipes prep etl start {name} --function ..."


@contextlib.contextmanager
def asking_etl(store: Bucket, name: str, *, shard: str | None = None) -> Iterator[None]:
    """The same as `Bucket.asking`; the errors of a missing ETL, and of a cluster without ETLs, also say what to do."""
    where = store.locate(shard) if shard else f"ETL {name}"
    with store.asking(where):
        try:
            yield
        except RefusedError as exc:
            text = str(exc)
            if (none := no_etl(store.endpoint, exc.status, text)) is not None:
                raise none from None
            is_about_it = shard is None and exc.status == 404 and name in text
            if is_about_it or is_unknown_etl(exc.status, text, name=name):
                text = f"no ETL '{name}' at {store.endpoint} ({text}); {how_to_start(name)}"
                raise StoreError(text) from None
            if exc.status == 422:
                reason = exc.reason or "no reason given"
                raise StoreError(f"'{where}' at {store.endpoint}: ETL '{name}' failed: {reason}") from None
            raise


def is_unknown_etl(status: int, text: str, *, name: str) -> bool:
    """Whether an answer means that the ETL does not exist or does not run."""
    # The name alone proves nothing: the name of a missing shard may contain it.
    return status == 404 and f"{name} does not exist - try" in text


def no_etl(endpoint: str, status: int, text: str) -> NoEtlError | None:
    """The error of a cluster that cannot have ETLs, or ``None`` if an answer's status and text mean something else."""
    if status == 400 and "kubernetes" in text.lower():  # AIS 4.9, in two ways
        cause = "it does not run on Kubernetes, whose pods run transforms"
    elif status == 501:  # AIS 5.0 that is built without the tag; or the embedded node
        cause = "an AIStore on Kubernetes, built with the tag etl, has it"
    else:
        return None
    return NoEtlError(
        f"no ETL at {endpoint}: {text}; {cause} (deploy/etl/README.md). The same from here, with no ETL: "
        "dali-pipes prep transform URL OUT --function ..."
    )


class TransformedStore(Store):
    """A bucket whose shards are read through a running ETL. They cannot be written.

    A listing has the names, sizes and checksums of the stored shards.
    """

    endpoint: str

    def __init__(self, store: Bucket, etl: str) -> None:
        self.stored = store
        self.etl = etl
        self.endpoint = store.endpoint

    @property
    def cluster(self) -> Bucket:
        return self.stored

    @property
    def url(self) -> str:
        return self.stored.url

    def stored_name(self, name: str) -> str:
        """The object's name in the bucket. A shard keeps its name; a manifest or index has the ETL in its name."""
        return transformed_name(name, etl=self.etl) if name.endswith(_DESCRIBES) else name

    def is_shard(self, name: str) -> bool:
        """Whether an object is read through the ETL."""
        return not name.endswith((_DESCRIBES, _CLASSES))

    def locate(self, name: str) -> str:
        return self.stored.locate(self.stored_name(name))

    def check_name(self, name: str) -> None:
        self.stored.check_name(name)

    def exists(self) -> bool:
        return self.stored.exists()

    def create(self) -> None:
        self.stored.create()

    def list(self, prefix: str) -> Sequence[ObjectEntry]:
        return self.stored.list(prefix)

    def list_all(self, prefix: str) -> Sequence[ObjectEntry]:
        return self.stored.list_all(prefix)

    def find_all(self, names: Sequence[str]) -> "Found":
        return self.stored.find_all(list(map(self.stored_name, names)))

    def read(self, name: str) -> bytes:
        if not self.is_shard(name):
            return self.stored.read(self.stored_name(name))
        return self._shards.read(name, max_bytes=MAX_OBJECT_BYTES)

    def find(self, name: str) -> bytes | None:
        return self.stored.find(self._beside(name))

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        """Read a range of a transformed shard; all bytes before ``start`` are read, too, and thrown away."""
        if not self.is_shard(name):
            return self.stored.read_range(self.stored_name(name), start=start, size=size)
        with self.open(name) as stream:
            while start and (skipped := stream.read(min(start, _BLOCK_BYTES))):
                start -= len(skipped)
            return stream.read(size)

    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        if not self.is_shard(name):
            return self.stored.open(self.stored_name(name))
        return cast("BinaryIO", io.BufferedReader(self._shards.open(name), _BLOCK_BYTES))

    @cached_property
    def _shards(self) -> ObjectFetcher:
        return self.open_shards()

    def open_shards(self) -> ObjectFetcher:
        """A reader of transformed shards with connections of its own."""
        stored = self.stored
        access = ClusterAccess.from_environment(stored.endpoint, proxies=stored.proxies)
        source = TransformedShards(access, stored.bucket, provider=stored.provider, etl=self.etl)
        return ObjectFetcher(source, retry=RetryPolicy(silence_s=SILENCE_S), patience=stored.patience)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_shards"}

    def access(self) -> Store:
        """The bucket's, without the ETL."""
        return self.stored.access()

    def file(self, name: str, *, size: int) -> Path | ObjectFile:
        return self.stored.file(name, size=size)

    def open_fetcher(self) -> "TransformedFetcher":
        return TransformedFetcher(self)

    def write(self, name: str, data: bytes) -> None:
        self.stored.write(self._beside(name), data)

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        self.stored.write_stream(self._beside(name), chunks, num_bytes=num_bytes)

    def write_new(self, name: str, data: bytes, *, by: str) -> bool:
        return self.stored.write_new(self._beside(name), data, by=by)

    def upload(self, name: str, path: Path) -> None:
        self.stored.upload(self._beside(name), path)

    def size(self, name: str) -> int | None:
        return self.stored.size(self.stored_name(name))

    def delete(self, name: str) -> None:
        self.stored.delete(self._beside(name))

    def _beside(self, name: str) -> str:
        assert not self.is_shard(name), "a shard is transformed when it is read"
        return self.stored_name(name)


def through_etl(shards: ShardSet, etl: str) -> ShardSet:
    """The same shards, read through an ETL of their cluster: see `open_transformed`."""
    store = open_transformed(shards.store, etl, url=shards.url)
    return ShardSet(store=store, names=shards.names, manifest_prefix=shards.manifest_prefix)


def open_transformed(store: Store, etl: str, *, url: str) -> TransformedStore:
    """A bucket as an ETL of its cluster gives its shards; ``url`` names the shards, for errors.

    Raises the errors of `check_running`, and a ``TypeError`` or ``ValueError`` if the shards are files, or ``etl`` is
    not a valid name.
    """
    if not isinstance(etl, str):
        raise TypeError(f"etl must be the name of an ETL, got {etl!r}")
    if store.cluster is None:
        raise ValueError(
            f"ETL '{etl}' with '{url}': a cluster's ETL transforms only objects in its buckets; transform these "
            f"files once and read the result: dali-pipes prep transform '{url}' OUT --function ..."
        )
    check_running(store.cluster, etl)
    return TransformedStore(store.cluster, etl)


class TransformedShards(StoredObjects):
    """Shards of a bucket, as an ETL transforms them."""

    sends_ranges = False

    def __init__(self, access: ClusterAccess, bucket: str, *, provider: str, etl: str) -> None:
        self._etl = etl
        self._index_again = f"index again: dali-pipes prep index URL --etl {etl}"
        changed = (
            f"the shard was replaced since, or the transform of ETL '{etl}' is another one: {self._index_again}; or it "
            "gives other bytes each time, which it must not"
        )
        super().__init__(access, bucket, provider=provider, changed=changed)
        self._query = {"etl_name": etl}
        self.question = f"is it well? ais etl view-logs {etl}; if it does not run, {how_to_start(etl)}"

    def where(self, name: str) -> str:
        return f"{super().where(name)} through ETL {self._etl}"

    def check_head(self, part: ObjectPart, answer: Answer) -> None:
        # AIStore's checksum does not count: if it reports one, it is not the transformed shard's.
        self.access.note_answer(answer)
        self._check_length(part.item, answer.length)
        if part.item.checksum is None:
            part.stop = answer.length
        else:
            part.hash = part.item.new_hash()

    def check_bytes(self, part: ObjectPart) -> None:
        if part.hash is not None and (digest := part.hash.hexdigest()) != part.item.expected:
            raise self._wrong(part, f"its bytes have the checksum {digest}, the manifest says {part.item.expected}")

    def refusal(self, part: ObjectPart, asked: ObjectRequest, answer: Answer, body: bytes) -> Exception:
        text = refusal_text(answer, body)
        if (none := no_etl(self.access.endpoint, answer.status, text)) is not None:
            return none
        if is_unknown_etl(answer.status, text, name=self._etl):
            # The ETL may come back: a lost pod is started again, and targets learn of an ETL one after the other.
            return FaultError(f"no ETL '{self._etl}' runs there ({text})", is_away=True)
        if answer.status == 422:  # `prep.etl` could not transform the shard
            reason = message_of(body.decode(errors="replace")) or "no reason given"
            return StoreError(f"{part.item.address}: ETL '{self._etl}' failed: {reason}")
        return super().refusal(part, asked, answer, body)

    def short_body(self, part: ObjectPart) -> Exception:
        if part.item.checksum is None:
            return super().short_body(part)
        return self._wrong(part, f"its body ends after {part.position} of {part.item.size} bytes")

    def long_body(self, part: ObjectPart) -> Exception:
        return self._wrong(part, f"its body has more than {part.item.size} bytes, the manifest's")

    def given_up(self, part: ObjectPart, fault: FaultError, what: str, advice: str) -> Exception:
        wrong = part.item.wrong
        if len(wrong) == part.num_attempts:
            return DataError(f"'{part.item.where}': {fault}; {self._how_often(wrong)}")
        return super().given_up(part, fault, what, advice)

    def _wrong(self, part: ObjectPart, what: str) -> Exception:
        """The error for a body that ended properly and differs from the indexed one."""
        item = part.item
        found = (part.position, "" if part.hash is None else part.hash.hexdigest())
        # A body of the right size did not break off, and two bodies do not break off at the same byte.
        is_certain = found in item.wrong or (found[0] == item.size and any(size == found[0] for size, _ in item.wrong))
        item.wrong.append(found)
        if is_certain:
            return DataError(f"'{item.where}': {what}; {self._how_often(item.wrong)}")
        return FaultError(what, is_fruitless=True)

    def _how_often(self, wrong: list[tuple[int, str]]) -> str:
        if len(set(wrong)) == len(wrong):
            return (
                f"ETL '{self._etl}' gave different bytes each of {len(wrong)} times: its transform must give the same "
                "bytes for the same shard, whatever the time and the process"
            )
        return (
            f"it gave the same bytes twice: the shard was replaced since, or the transform of ETL '{self._etl}' is "
            f"another one; {self._index_again}"
        )


class TransformedFetcher:
    """A `dali_pipes.fetch.fetcher.Fetcher` of shards through an ETL, and of their indexes, which are stored."""

    def __init__(self, store: TransformedStore) -> None:
        self._store, self._stored, self._shards = store, store.stored.open_fetcher(), store.open_shards()

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        """See `dali_pipes.fetch.fetcher.Fetcher`; fetches shards first, then their indexes.

        A `DataError` also means that the transform changed, or gives other bytes each time.
        """
        for fetcher, are_shards in ((self._shards, True), (self._stored, False)):
            objects = [
                one._replace(name=self._store.stored_name(one.name))
                for one in wanted
                if self._store.is_shard(one.name) == are_shards
            ]
            if not fetcher.fetch(objects, stopped=stopped, num_connections=num_connections):
                return False
        return True

    def close(self) -> None:
        """Close all connections. Can be called twice."""
        self._shards.close()
        self._stored.close()
