"""Objects that are read as a stream: each byte once, of one version, in order, or an error."""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.store.cloud.objects import CloudObjects
from dali_pipes.store.http.answers import ObjectRequest
from dali_pipes.store.http.client import HttpAccess
from dali_pipes.store.http.objects import ObjectFetcher, ObjectFile, _Helpers
from tests.dali_pipes.fetch.served import BRIEF, RETRY, ranged
from tests.servers.scripted import Script, ScriptedServer, Visit, scripted

SMALL = random.Random(2).randbytes(4000)
LARGE = random.Random(3).randbytes(8 << 20)


@dataclass
class Access:
    """A worker's access to the objects of a fetcher."""

    objects: ObjectFetcher
    url: str = "s3://b"


@contextlib.contextmanager
def fetching_from(script: Script) -> Iterator[tuple[ScriptedServer, ObjectFetcher]]:
    with scripted(script) as server:
        source = CloudObjects(
            lambda name: ObjectRequest(f"{server.endpoint}/{name}"),
            locate=lambda name: f"s3://b/{name}",
            access=HttpAccess(endpoint=server.endpoint),
            service="S3",
        )
        with ObjectFetcher(source, retry=RETRY, patience=BRIEF) as fetcher:
            yield server, fetcher


def read(file: ObjectFile, size: int, *, start: int = 0, block: int = 700) -> bytes:
    found, view = bytearray(), memoryview(bytearray(block))
    while len(found) < size and (num := file.read_into(view, offset=start + len(found))):
        found += view[:num]
    return bytes(found)


def as_file(fetcher: ObjectFetcher) -> bytes:
    with contextlib.closing(ObjectFile(Access(fetcher), "o", len(SMALL))) as file:
        return read(file, len(SMALL))


def as_stream(fetcher: ObjectFetcher) -> bytes:
    with fetcher.open("o") as stream:
        return stream.read()


@pytest.mark.parametrize("read_all", [as_file, as_stream])
def test_resumed_stream_that_gets_other_bytes_repeats_none(read_all: Callable[[ObjectFetcher], bytes]) -> None:
    """A broken stream goes on where it broke, also after an answer with a range that nobody asked for."""

    def script(visit: Visit) -> None:
        if visit.number == 0:
            visit.request = visit.request.replace(b"\r\n\r\n", b"\r\nRange: bytes=0-3999\r\n\r\n")
            whole = ranged(visit, SMALL)
            is_ranged = read_all is as_file
            head = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 4000\r\n\r\n'
            visit.send(whole[: len(whole) - 3000] if is_ranged else head + SMALL[:1000])
            visit.hang_up()
        else:
            visit.send(ranged(visit, SMALL, shift=-1 if visit.number == 1 else 0))

    with fetching_from(script) as (_, fetcher):
        assert read_all(fetcher) == SMALL


def test_error_of_a_thread_that_helps_is_raised_by_its_owner() -> None:
    with _Helpers(lambda: False) as helpers:
        helpers.start(lambda stopped: 1 // stopped())
        for ask in (helpers.wait, helpers.is_stopped):
            with pytest.raises(ZeroDivisionError):
                ask()


def test_file_that_became_shorter_is_an_error() -> None:
    """Its size is known from a listing: fewer bytes are another object's."""
    with fetching_from(lambda visit: visit.send(ranged(visit, SMALL[:2000]))) as (_, fetcher):
        file = ObjectFile(Access(fetcher), "o", len(SMALL))
        assert read(file, 2000) == SMALL[:2000]
        with pytest.raises(StoreError, match="was replaced while it was read"):
            read(file, 100, start=2000)


def test_file_of_a_forked_process_has_a_connection_of_its_own() -> None:
    """Parent and child would share the bytes of one answer: each would lack what the other read."""
    with fetching_from(lambda visit: visit.send(ranged(visit, LARGE))) as (server, fetcher):
        file = ObjectFile(Access(fetcher), "o", len(LARGE))
        assert read(file, 1000, block=1000) == LARGE[:1000]
        child = os.fork()
        if not child:
            is_same = False
            with contextlib.suppress(Exception):
                is_same = read(file, 1 << 20, start=1000, block=100_000)[: 1 << 20] == LARGE[1000:][: 1 << 20]
                file.close()
            os._exit(0 if is_same else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert read(file, len(LARGE) - 1000, start=1000, block=100_000) == LARGE[1000:]
        file.close()
        assert server.num_connections == 2


@pytest.mark.parametrize("field", [b'ETag: "%d"', b'ETag: W/"%d"', b"Last-Modified: Mon, 01 Jan 2024 00:00:0%d GMT"])
def test_resumed_stream_of_another_version_is_an_error(field: bytes) -> None:
    """Bytes of two objects are no object."""

    def script(visit: Visit) -> None:
        answer = ranged(visit, SMALL, version=field % visit.number)
        visit.send(answer if visit.number else answer[:-3000])
        visit.hang_up()

    with fetching_from(script) as (_, fetcher), pytest.raises(StoreError, match="was replaced while it was read"):
        fetcher.read("o", start=0, size=len(SMALL))
