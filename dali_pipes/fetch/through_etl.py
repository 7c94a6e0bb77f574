"""Fetch shards through an ETL: GETs that name it bring transformed shards, which are counted and checked.

An ETL sends a shard whole, from the first byte, whatever range is asked for, mostly without its length, and without a
checksum. So each attempt starts again. When a pod breaks off, AIStore has sent status 200 already; it adds the text of
its error to the body and ends the body properly. So a wrong body counts as a broken transfer as long as it can be one.
If it cannot be one, the transform gives other bytes than when the shards were indexed.
"""

import tempfile
from collections.abc import Callable, Sequence
from typing import BinaryIO, Protocol, cast

from dali_pipes.cache.extents import Extent
from dali_pipes.errors import DataError, StoreError
from dali_pipes.fetch.answers import StoredObjects, refusal_text
from dali_pipes.fetch.fetcher import Fetcher, Wanted
from dali_pipes.fetch.objects import ObjectFetcher, RetryPolicy
from dali_pipes.fetch.parts import FaultError, FetchedObject, ObjectPart, ObjectRequest
from dali_pipes.fetch.transport.access import ClusterAccess
from dali_pipes.fetch.transport.http_head import Answer
from dali_pipes.store.base import Bucket
from dali_pipes.store.cluster.etl import how_to_start, is_unknown_etl, no_etl
from dali_pipes.store.patience import Patience

SILENCE_S = 300.0
"""No byte comes before the transform is done. AIStore ends a transform after the ETL's ``obj_timeout``."""


class ShardsThroughEtl(Protocol):
    """The part that a fetcher uses of a store whose shards are read through an ETL."""

    etl: str
    stored: Bucket
    """The bucket without the ETL."""

    def is_shard(self, name: str) -> bool:
        """Whether an object is read through the ETL."""

    def stored_name(self, name: str) -> str:
        """The name of an object in the bucket."""


class TransformedFetcher:
    """A `dali_pipes.fetch.fetcher.Fetcher` of shards through an ETL, and of their indexes, which are stored."""

    def __init__(
        self,
        access: ClusterAccess,
        store: ShardsThroughEtl,
        *,
        retry: RetryPolicy | None = None,
        patience: Patience | None = None,
    ) -> None:
        bucket, provider = store.stored.bucket, store.stored.provider
        self._store = store
        self._stored = ObjectFetcher(StoredObjects(access, bucket, provider=provider), retry=retry, patience=patience)
        self._shards = ObjectFetcher(
            TransformedShards(access, bucket, provider=provider, etl=store.etl),
            retry=retry or RetryPolicy(silence_s=SILENCE_S),
            patience=patience,
        )

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        """See `dali_pipes.fetch.fetcher.Fetcher`; fetches shards first, then their indexes.

        Raises:
            CacheError: If bytes cannot be stored.
            DataError: If a shard differs from the indexed one: it was replaced, the transform changed, or the transform
                gives other bytes each time.
            NoEtlError: If the cluster has no ETL.
            StoreError: If a shard cannot be read: the ETL fails on it, or does not run until the patience is over.
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

    def where(self, name: str) -> str:
        return f"{super().where(name)} through ETL {self._etl}"

    def check_head(self, item: FetchedObject, part: ObjectPart, answer: Answer) -> None:
        # AIStore's checksum does not count: if it reports one, it is not the transformed shard's.
        self._check_length(item, answer.length)
        part.restart()
        part.hashes = item.hashes()

    def check_bytes(self, item: FetchedObject, part: ObjectPart) -> None:
        if (digest := part.hashes[0].hexdigest()) != f"{item.checksum:016x}":
            raise self._wrong(item, part, item.differs(digest))

    def refusal(
        self,
        item: FetchedObject,
        part: ObjectPart,
        answer: Answer,
        body: bytes,
        *,
        asked: ObjectRequest,
        url: str,
        is_known: bool,
    ) -> Exception:
        self.access.proxies.turn_if_starting(answer.status, url)
        text = refusal_text(answer, body)
        if (none := no_etl(self.access.endpoint, answer.status, text)) is not None:
            return none
        if is_unknown_etl(answer.status, text, name=self._etl):
            # The ETL may come back: a lost pod is started again, and targets learn of an ETL one after the other.
            return FaultError(f"no ETL '{self._etl}' runs there ({text})", is_away=True)
        if answer.status == 422:  # `prep.etl` could not transform the shard
            return StoreError(f"{item.address}: the ETL failed: {text}")
        return super().refusal(item, part, answer, body, asked=asked, url=url, is_known=is_known)

    def short_body(self, item: FetchedObject, part: ObjectPart) -> Exception:
        return self._wrong(item, part, f"its body ends after {part.position} of {item.extent.size} bytes")

    def long_body(self, item: FetchedObject, part: ObjectPart) -> Exception:
        return self._wrong(item, part, f"its body has more than {item.extent.size} bytes, the manifest's")

    def given_up(
        self, item: FetchedObject, what: str, fault: FaultError, *, num_attempts: int, advice: str
    ) -> Exception:
        if len(item.wrong) == num_attempts:
            return DataError(f"'{item.where}': {fault}; {self._how_often(item.wrong)}")
        return StoreError(
            f"{what}; is it well? ais etl view-logs {self._etl}; if it does not run, {how_to_start(self._etl)}{advice}"
        )

    def _wrong(self, item: FetchedObject, part: ObjectPart, what: str) -> Exception:
        """The error for a body that ended properly and differs from the indexed one."""
        found = (part.position, part.hashes[0].hexdigest())
        # A body of the right size did not break off, and two bodies do not break off at the same byte.
        is_certain = found in item.wrong or (
            found[0] == item.extent.size and any(size == found[0] for size, _ in item.wrong)
        )
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


class WholeShards:
    """Reads parts of shards that can only be fetched whole; keeps the last shard, checked, in a file without a name."""

    def __init__(self, open_fetcher: Callable[[], Fetcher]) -> None:
        self._open_fetcher = open_fetcher
        self._fetcher: Fetcher | None = None
        self._file: BinaryIO | None = None
        self._name = ""

    def read(self, name: str, *, shard_bytes: int, checksum: int, start: int, size: int) -> bytes:
        """Read the shard's bytes ``[start, start + size)``; raises the fetcher's errors."""
        if self._file is None or name != self._name:
            self._forget()
            if self._fetcher is None:
                self._fetcher = self._open_fetcher()
            file = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 (closed by _forget)
            try:
                extent = Extent(file.fileno(), 0, shard_bytes)
                self._fetcher.fetch([Wanted(name, extent, checksum)], stopped=lambda: False)
            except BaseException:
                file.close()
                raise
            self._file, self._name = file, name
        return Extent(self._file.fileno(), 0, shard_bytes).read(start, size)

    def close(self) -> None:
        """Drop the shard and the connections. Can be called twice."""
        self._forget()
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.close()

    def _forget(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
