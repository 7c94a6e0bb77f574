"""Read ranges of many objects of a cluster by one request: AIStore's GetBatch, which answers with a tar.

A cluster of 5.0 takes bytes of objects; one of 4.9 answers with nothing, without an error, and takes names of members.
Its answers are checked as all ranges are, so each way is tried until it brings nothing; that is remembered.
"""

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, cast
from urllib.parse import urlencode, urljoin

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.shard_index import ComponentRange
from dali_pipes.formats.tar_reader import ArchiveReader
from dali_pipes.store.cluster.access import Proxies
from dali_pipes.store.http.client import HttpClient, NoAnswerError
from dali_pipes.store.http.rules import RedirectError, is_passing
from dali_pipes.store.http.wire import Answer, ProtocolError
from dali_pipes.store.ranges import Way

_Entry = Callable[[ComponentRange], dict[str, Any]]
_ENTRIES: dict[str, _Entry] = {
    "ranges": lambda one: {"start": one.start, "length": one.size},
    "members": lambda one: {"archpath": f"{one.key}.{one.component}"},
}
"""The fields by which a request names a range within its object, for each way; the best way is first."""


class BatchRequests:
    """Sends GetBatch requests for one bucket; ``ways`` are the ways that have not failed yet."""

    def __init__(self, client: HttpClient, proxies: Proxies, bucket: str, *, query: Mapping[str, str]) -> None:
        self._client, self._proxies, self._bucket, self._query = client, proxies, bucket, urlencode(query)
        self._kinds = list(_ENTRIES)

    @property
    def ways(self) -> list[Way]:
        return [partial(self._read, kind) for kind in self._kinds]

    def _read(self, kind: str, ranges: Sequence[ComponentRange]) -> list[bytes]:
        found = [b""] * len(ranges)
        entries = [{"objname": one.shard, **_ENTRIES[kind](one)} for one in ranges]
        # What is missing is an empty entry, and not an error; the tar is sent while it is made.
        body = json.dumps({"in": entries, "mime": ".tar", "coer": True, "onob": True, "strm": True}).encode()
        url = f"{urljoin(self._proxies.current, 'v1')}/ml/moss/{self._bucket}?{self._query}"
        # Whatever fails, the next way has patience, and says what is wrong.
        with contextlib.suppress(NoAnswerError, RedirectError, StoreError):
            answer = self._client.follow(url, headers=[("Content-Type", "application/json")], body=body)
            with contextlib.closing(answer), contextlib.suppress(OSError, ProtocolError, DataError):
                if answer.status == 200:
                    self._take(answer, ranges, found)
            brought = any(one.is_of(data) for one, data in zip(ranges, found, strict=True))
            if not brought and not is_passing(answer.status) and kind in self._kinds:
                self._kinds.remove(kind)
        return found

    def _take(self, answer: Answer, ranges: Sequence[ComponentRange], found: list[bytes]) -> None:
        """Take the entries of an answer, which come in the order of the request; wrong ones are left out."""
        stream = cast("BinaryIO", io.BufferedReader(_Body(answer), 1 << 18))
        for at, member in enumerate(_Batch(stream, shard=answer.url)):
            if at == len(ranges):
                return
            if member.size == ranges[at].size:
                found[at] = member.read()


class _Batch(ArchiveReader):
    def _names(self, name: str) -> tuple[str, str]:
        return name, ""  # every entry is one answer


class _Body(io.RawIOBase):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        return self._answer.receive(memoryview(view).cast("B"))
