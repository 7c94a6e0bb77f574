"""Fetch a bucket's objects as one client does, and measure the cost.

The measurement is of the transfer only: it makes connections, follows redirects, receives bytes, and stores them if the
client does that. Imports, and the check of the bytes afterwards, are not included. CPU time is that of all threads of
this process.
"""

import contextlib
import http.client
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import xxhash

from bench.tools.memory import touch_memory
from dali_pipes.cache.extents import Extent, extent_starts
from dali_pipes.errors import DataError, PipesError
from dali_pipes.fetch.answers import StoredObjects
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.fetch.objects import ObjectFetcher
from dali_pipes.fetch.transport.access import ClusterAccess
from dali_pipes.store.cluster.client import ais_client
from dali_pipes.store.cluster.transport.http_rules import object_url

READ_BYTES = 1 << 20
# Runs of `curl --version`. Their median is subtracted, because loading curl's libraries is not a part of the transfer.
NUM_STARTS = 5


@dataclass(frozen=True, kw_only=True)
class ClientTask:
    """The objects that one client reads."""

    client: str
    endpoint: str
    bucket: str
    names: Sequence[str]
    object_bytes: int
    """Bytes of each object."""
    checksums: Sequence[int]
    """XXH64 of each."""
    connections: int
    """Objects in flight."""
    directory: str
    """The directory of clients that store what they fetch."""
    checked: int = 0
    """The index of the object whose bytes are hashed again after the clock has stopped."""

    @property
    def total_bytes(self) -> int:
        return self.object_bytes * len(self.names)

    def url(self, name: str) -> str:
        return object_url(self.endpoint, self.bucket, name, provider="ais")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of fetching all objects."""

    wall_s: float
    cpu_s: float
    """User and system time."""
    start_s: float = 0.0
    """The time that a program needs to start. It is not included in ``wall_s``, nor its CPU time in ``cpu_s``."""


def fetch_ours(task: ClientTask) -> Cost:
    """Fetch with one `ObjectFetcher` in each thread, into reserved extents of a sparse file; verify checksums."""
    starts = extent_starts([task.object_bytes] * len(task.names))
    connection = ClusterAccess.from_environment(task.endpoint)
    with tempfile.TemporaryFile(dir=task.directory, buffering=0) as cache_file:
        os.ftruncate(cache_file.fileno(), int(starts[-1]))
        extents = [Extent(cache_file.fileno(), int(start), task.object_bytes) for start in starts[:-1]]
        numbers = iter(range(len(task.names)))

        def work() -> None:
            with ObjectFetcher(StoredObjects(connection, task.bucket)) as fetcher:
                for number in numbers:
                    # As the cache does: reserve the space before the bytes come.
                    os.posix_fallocate(
                        cache_file.fileno(), int(starts[number]), int(starts[number + 1] - starts[number])
                    )
                    fetcher.fetch([Wanted(task.names[number], extents[number], task.checksums[number])])

        cost = _timed(lambda: _in_threads(work, task.connections), warmed_bytes=task.total_bytes)
        stored = os.fstat(cache_file.fileno()).st_blocks * 512
        # A disk's file system may count a block of its own.
        _check(
            stored >= int(starts[-1]), task, f"{stored} bytes are allocated in the cache file, expected {starts[-1]}"
        )
        _check_checksum(extents[task.checked].checksum(), task)
        return cost


def fetch_sdk(task: ClientTask) -> Cost:
    """Fetch with the SDK's ``read_all()`` in as many threads; store nothing."""
    bucket = ais_client(task.endpoint).bucket(task.bucket)
    kept: list[bytes] = []

    def read(number: int) -> int:
        data: bytes = bucket.object(task.names[number]).get_reader().read_all()
        if number == task.checked:
            kept.append(data)
        return len(data)

    sizes: list[int] = []

    def work() -> None:
        with ThreadPoolExecutor(task.connections) as threads:
            sizes.extend(threads.map(read, range(len(task.names))))

    cost = _timed(work, warmed_bytes=task.total_bytes)
    _check_sizes(sizes, task)
    _check_checksum(xxhash.xxh64_intdigest(kept[0]), task)
    return cost


def fetch_curl(task: ClientTask) -> Cost:
    """Fetch with the program curl, ``--parallel`` with as many connections, into files; subtract its start."""
    curl = find_curl()
    if curl is None:
        raise PipesError("no 'curl' in PATH; install it, or leave it out: --clients ours,sdk")
    connection = ClusterAccess.from_environment(task.endpoint)
    with tempfile.TemporaryDirectory(dir=task.directory) as folder:
        paths = [Path(folder) / str(number) for number in range(len(task.names))]
        lines = [f"parallel-max = {task.connections}", *_curl_access(connection)]
        for name, path in zip(task.names, paths, strict=True):
            lines += [f"url = {_quoted(task.url(name))}", f"output = {_quoted(str(path))}"]
        config = Path(folder) / "config"
        # It may hold a token: only the owner may read it, while all users could see the arguments.
        config.touch(mode=0o600)
        config.write_text("\n".join(lines) + "\n")
        options = ["--disable", "--parallel", "--parallel-immediate", "--location", "--fail", "--silent"]
        command = [curl, *options, "--show-error", "--config", str(config)]
        starts = [_timed(lambda: _run([curl, "--disable", "--version"]), children=True) for _ in range(NUM_STARTS)]
        start = sorted(starts, key=lambda cost: cost.wall_s)[NUM_STARTS // 2]
        cost = _timed(lambda: _run(command), children=True, warmed_bytes=task.total_bytes)
        _check_sizes([path.stat().st_size if path.exists() else 0 for path in paths], task)
        state = xxhash.xxh64()
        with paths[task.checked].open("rb") as stream:
            while block := stream.read(READ_BYTES):
                state.update(block)
        _check_checksum(state.intdigest(), task)
        # Subtract at most half: a transfer of a few KiB takes no longer than the start.
        wall_s, cpu_s = (
            max(spent - off, spent / 2) for spent, off in ((cost.wall_s, start.wall_s), (cost.cpu_s, start.cpu_s))
        )
        return Cost(wall_s=wall_s, cpu_s=cpu_s, start_s=start.wall_s)


def drain(task: ClientTask) -> Cost:
    """Let the kernel drop the bytes (``MSG_TRUNC``): shows the server's speed with a client that costs least."""
    numbers = iter(range(len(task.names)))
    sizes = [0] * len(task.names)

    def work() -> None:
        with contextlib.closing(_Drain()) as client:
            for number in numbers:
                sizes[number] = client.get(task.url(task.names[number]))

    cost = _timed(lambda: _in_threads(work, task.connections), warmed_bytes=task.total_bytes)
    _check_sizes(sizes, task)
    return cost


CLIENTS: dict[str, Callable[[ClientTask], Cost]] = {
    "ours": fetch_ours,
    "sdk": fetch_sdk,
    "curl": fetch_curl,
    "drain": drain,
}
"""Name to function. ``drain`` is for the server's own figure."""


class _Drain:
    """Keeps one connection open to each address."""

    def __init__(self) -> None:
        self._connections: dict[str, http.client.HTTPConnection] = {}
        self._buffer = bytearray(READ_BYTES)

    def get(self, url: str) -> int:
        """Follow redirects, drop the body, and return its size."""
        parts = urlsplit(url)
        connection = self._connections.setdefault(parts.netloc, http.client.HTTPConnection(parts.netloc))
        connection.request("GET", f"{parts.path}?{parts.query}")
        answer = connection.getresponse()
        if answer.status == 301:
            answer.read()
            return self.get(answer.headers["location"])
        if answer.status != 200:
            raise ConnectionError(f"'{url}' answered {answer.status}")
        num_bytes = int(answer.headers["content-length"])
        # The head was read together with the first bytes of the body.
        left = num_bytes - len(answer.read(min(num_bytes, len(answer.fp.peek()))))
        while left:
            dropped = connection.sock.recv_into(self._buffer, min(left, READ_BYTES), socket.MSG_TRUNC)
            if not dropped:
                raise ConnectionError(f"'{url}' ended {left} bytes early")
            left -= dropped
        answer.close()
        return num_bytes

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def find_curl() -> str | None:
    return shutil.which("curl")


def _curl_access(connection: ClusterAccess) -> Iterator[str]:
    """Lines of curl's configuration: proxy, token and TLS, from the environment variables of the SDK."""
    if connection.proxy_for(connection.endpoint) is None:
        yield 'noproxy = "*"'
    if connection.bearer:
        # As with the SDK, a redirect to another host or port does not take it along.
        yield f"header = {_quoted(f'Authorization: Bearer {connection.bearer}')}"
    if connection.ca:
        yield f"{'capath' if connection.ca.is_dir() else 'cacert'} = {_quoted(str(connection.ca))}"
    if connection.client_cert:
        certificate, key = connection.client_cert
        yield f"cert = {_quoted(str(certificate))}"
        yield f"key = {_quoted(str(key))}"
    if connection.skip_verify:
        yield "insecure"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 (curl, with our config)
    if done.returncode:
        raise PipesError(f"curl failed, exit status {done.returncode}: {done.stderr.strip()}")


def _timed(work: Callable[[], None], *, children: bool = False, warmed_bytes: int = 0) -> Cost:
    touch_memory(warmed_bytes)  # Note [cold memory]
    who = resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF
    before, start = resource.getrusage(who), time.perf_counter()
    work()
    wall_s, after = time.perf_counter() - start, resource.getrusage(who)
    cpu_s = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)
    return Cost(wall_s=wall_s, cpu_s=cpu_s)


def _in_threads(work: Callable[[], None], num: int) -> None:
    """Run a function in ``num`` threads; raise the first error when all have ended."""
    with ThreadPoolExecutor(num) as threads:
        for done in [threads.submit(work) for _ in range(num)]:
            done.result()


def _check_sizes(sizes: Sequence[int], task: ClientTask) -> None:
    wrong = [(name, size) for name, size in zip(task.names, sizes, strict=True) if size != task.object_bytes]
    _check(not wrong, task, f"{len(wrong)} objects of another size than {task.object_bytes}, such as {wrong[:1]}")


def _check_checksum(found: int, task: ClientTask) -> None:
    name, expected = task.names[task.checked], task.checksums[task.checked]
    _check(found == expected, task, f"object '{name}' has the xxhash2 {found:016x}, expected {expected:016x}")


def _check(is_right: bool, task: ClientTask, found: str) -> None:
    if not is_right:
        raise DataError(f"client '{task.client}', bucket '{task.bucket}' at {task.endpoint}: {found}")
