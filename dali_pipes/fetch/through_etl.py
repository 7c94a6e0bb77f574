"""Fetch a shard through an ETL: GETs that name it out, the transformed shard into an extent, counted and checked.

An ETL gives a shard whole: it sends it from the beginning, whatever range is asked for, mostly without saying how long
it is, and without a checksum. So each attempt starts again; and where a pod breaks off, AIStore has said 200 already,
adds its error's text to the body and ends it as if all were well. What came is therefore taken for a break as long as
it may be one; when it cannot be, the transform gives other bytes than when it was indexed.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from dali_pipes.cache.extents import Extent
from dali_pipes.errors import DataError, StoreError
from dali_pipes.fetch.connection_pool import ClusterAccess
from dali_pipes.fetch.http1 import Answer
from dali_pipes.fetch.objects import ObjectFetcher, RetryPolicy, _FaultError, _Object, _Part, _reason
from dali_pipes.fetch.stager import Fetcher, Wanted
from dali_pipes.store.etl import TransformedStore
from dali_pipes.store.etl_errors import how_to_start, is_unknown_etl, no_etl

__all__ = ["TransformedFetcher", "WholeShards"]

SILENCE_S = 300.0
"""Nothing comes before the transform is done. AIStore ends one that takes longer than the ETL's ``obj_timeout``."""


class TransformedFetcher:
    """A `dali_pipes.fetch.stager.Fetcher` of shards through an ETL, and of what describes them.

    Args:
        connection: The cluster.
        store: The bucket, and the ETL.
        retry: How long to go on when something breaks.
    """

    def __init__(self, connection: ClusterAccess, store: TransformedStore, *, retry: RetryPolicy | None = None) -> None:
        bucket, provider = store.stored.bucket, store.stored.provider
        self._store = store
        self._described = ObjectFetcher(connection, bucket, provider=provider, retry=retry)
        self._shards = _ShardFetcher(
            connection, bucket, provider=provider, etl=store.etl, retry=retry or RetryPolicy(silence_s=SILENCE_S)
        )

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Callable[[], bool], num_connections: int = 1) -> bool:
        """See `dali_pipes.fetch.stager.Fetcher`; what describes the shards comes after them.

        Raises:
            CacheError: If its bytes cannot be stored.
            DataError: If it is not what was indexed: the shard was replaced, the transform changed, or it gives other
                bytes each time.
            NoEtlError: If the cluster has no ETL.
            StoreError: If it cannot be had: the ETL fails on it, or does not run, also not after some seconds.
        """
        for fetcher, are_shards in ((self._shards, True), (self._described, False)):
            stored = [
                one._replace(name=self._store.stored_name(one.name))
                for one in wanted
                if self._store.is_shard(one.name) == are_shards
            ]
            if not fetcher.fetch(stored, stopped=stopped, num_connections=num_connections):
                return False
        return True

    def close(self) -> None:
        """Close all connections. Can be called twice."""
        self._shards.close()
        self._described.close()


@dataclass
class _Transformed(_Object):
    wrong: list[tuple[int, str]] = field(default_factory=list)
    """Bodies that came to their end and were not what was indexed: bytes and XXH64 of what was taken of each."""


class _ShardFetcher(ObjectFetcher):
    """Fetches nothing but transformed shards."""

    _resumes = False

    def __init__(self, connection: ClusterAccess, bucket: str, *, provider: str, etl: str, retry: RetryPolicy) -> None:
        super().__init__(connection, bucket, provider=provider, retry=retry)
        self._etl = etl
        self._reads_ranges = False
        self._other_bytes = (
            f"the shard was replaced since, or the transform of ETL '{etl}' is another one: index again: dali-pipes "
            f"prep index URL --etl {etl}; or it gives other bytes each time: it must not"
        )

    def _object(self, name: str, extent: Extent, checksum: int) -> _Object:
        return _Transformed(name, f"{self._url}/{name} through ETL {self._etl}", extent, checksum)

    def _object_url(self, item: _Object) -> str:
        return self._connection.object_url(self._bucket, item.name, provider=self._provider, etl_name=self._etl)

    def _refusal(self, item: _Object, answer: Answer, body: bytes, *, is_known: bool) -> Exception:
        text = self._masked(_reason(answer, body))
        if (none := no_etl(self._connection.endpoint, answer.status, text)) is not None:
            return none
        if is_unknown_etl(answer.status, text, name=self._etl):
            # It may be on its way: a pod that is lost is started anew, and targets learn of an ETL one after the other.
            return _FaultError(f"no ETL '{self._etl}' runs there ({text})")
        if answer.status == 422:  # what `prep.etl.server` answers for a shard that it cannot transform
            return StoreError(f"'{item.where}' at {self._connection.endpoint}: the ETL failed: {text}")
        return super()._refusal(item, answer, body, is_known=is_known)

    def _check_head(self, item: _Object, part: _Part, answer: Answer) -> None:
        # Not AIStore's checksum: where there is one it is not the transformed shard's.
        if answer.length not in (None, item.extent.size):
            raise self._wrong_size(item, f"{answer.length} bytes")
        part.restart()
        part.hashes = item.hashes()

    def _short(self, item: _Object, part: _Part) -> Exception:
        return self._wrong(item, part, f"its body ends after {part.position} of {item.extent.size} bytes")

    def _long(self, item: _Object, part: _Part) -> Exception:
        return self._wrong(item, part, f"its body has more than {item.extent.size} bytes, the manifest's")

    def _check_digests(self, item: _Object, part: _Part) -> None:
        if (digest := part.hashes[0].hexdigest()) != f"{item.checksum:016x}":
            raise self._wrong(
                item, part, f"its bytes have the xxhash2 {digest}, the manifest says {item.checksum:016x}"
            )

    def _wrong(self, item: _Object, part: _Part, what: str) -> Exception:
        """What to raise for a body that came to its end and is not what was indexed."""
        wrong = cast("_Transformed", item).wrong
        found = (part.position, part.hashes[0].hexdigest())
        # Of the right size none has broken off, and twice at one byte none does.
        is_certain = found in wrong or (found[0] == item.extent.size and any(size == found[0] for size, _ in wrong))
        wrong.append(found)
        if is_certain:
            return DataError(f"'{item.where}': {what}; {self._how_often(wrong)}")
        return _FaultError(what, is_fruitless=True)

    def _given_up(self, item: _Object, num_attempts: int, fault: _FaultError) -> Exception:
        wrong = cast("_Transformed", item).wrong
        if len(wrong) == num_attempts:
            return DataError(f"'{item.where}': {fault}; {self._how_often(wrong)}")
        return StoreError(
            f"'{item.where}' at {self._connection.endpoint}: given up after {num_attempts} attempts in "
            f"{time.monotonic() - item.started:.1f} s, the last one: {fault}; is it well? ais etl view-logs "
            f"{self._etl}; if it does not run, {how_to_start(self._etl)}"
        )

    def _how_often(self, wrong: list[tuple[int, str]]) -> str:
        if len(set(wrong)) == len(wrong):
            return (
                f"ETL '{self._etl}' gave other bytes each of {len(wrong)} times: its transform must give the same "
                "bytes for the same shard, whatever the time and the process"
            )
        return (
            f"it gave the same twice: the shard was replaced since, or the transform of ETL '{self._etl}' is another "
            f"one; index again: dali-pipes prep index URL --etl {self._etl}"
        )


class WholeShards:
    """Parts of shards that can be had whole only: the shard that was asked for last is kept, checked, in a file without
    a name.

    Args:
        open_fetcher: Called for what fetches them.
    """

    def __init__(self, open_fetcher: Callable[[], Fetcher]) -> None:
        self._open_fetcher = open_fetcher
        self._fetcher: Fetcher | None = None
        self._file: BinaryIO | None = None
        self._name = ""

    def read(self, name: str, *, shard_bytes: int, checksum: int, start: int, size: int) -> bytes:
        """The shard's bytes ``[start, start + size)``.

        Raises:
            CacheError, DataError, StoreError: As the fetcher.
        """
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
        """Give up the shard and the connections. Can be called twice."""
        self._forget()
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.close()

    def _forget(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
