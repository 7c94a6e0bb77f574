"""One client's turn at a bucket's objects, in a process of its own: a task on stdin, what it cost on stdout, as JSON.

Measured is the transfer alone: connections made, redirects followed, bytes received and, for those that store them,
stored; not the interpreter's start, imports, or the check of the bytes afterwards. CPU is this process's, all threads.
"""

import contextlib
import json
import os
import queue
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import xxhash

from bench.scenarios.warm import touch_memory
from dali_pipes.cache.extents import Extent, extent_starts
from dali_pipes.errors import DataError, PipesError
from dali_pipes.fetch.connection_pool import ClusterAccess
from dali_pipes.fetch.objects import ObjectFetcher
from dali_pipes.fetch.stager import Wanted
from dali_pipes.store.ais import ais_client

__all__ = ["CLIENTS", "ClientTask", "Cost", "find_curl"]

READ_BYTES = 1 << 20
# Runs of `curl --version`, whose median is taken off: loading curl's libraries is no transfer.
NUM_STARTS = 5


@dataclass(frozen=True, kw_only=True)
class ClientTask:
    """What one client is to read."""

    client: str
    endpoint: str
    bucket: str
    names: Sequence[str]
    object_bytes: int
    """Of each."""
    checksums: Sequence[int]
    """XXH64 of each."""
    connections: int
    """Objects in flight."""
    directory: str
    """Where what is stored is stored."""
    checked: int = 0
    """The object whose bytes are hashed again after the clock has stopped."""

    @property
    def total_bytes(self) -> int:
        return self.object_bytes * len(self.names)

    def url(self, name: str) -> str:
        """Where the proxy has an object."""
        return ClusterAccess(endpoint=self.endpoint).object_url(self.bucket, name, provider="ais")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What it cost."""

    wall_s: float
    cpu_s: float
    """User and system time."""
    start_s: float = 0.0
    """Taken off ``wall_s`` (and the CPU that it took off ``cpu_s``): the start of a program that is run anew."""


def fetch_ours(task: ClientTask) -> Cost:
    """`ObjectFetcher`, one a thread, into reserved extents of a sparse file, checksums verified."""
    starts = extent_starts([task.object_bytes] * len(task.names))
    connection = ClusterAccess.from_environment(task.endpoint)
    with tempfile.TemporaryFile(dir=task.directory, buffering=0) as image:
        os.ftruncate(image.fileno(), int(starts[-1]))
        extents = [Extent(image.fileno(), int(start), task.object_bytes) for start in starts[:-1]]
        numbers = _queued(len(task.names))

        def work() -> None:
            with ObjectFetcher(connection, task.bucket) as fetcher:
                for number in _taken(numbers):
                    # As the image does: the room is there before the bytes are.
                    os.posix_fallocate(image.fileno(), int(starts[number]), int(starts[number + 1] - starts[number]))
                    fetcher.fetch([Wanted(task.names[number], extents[number], task.checksums[number])])

        cost = _timed(lambda: _in_threads(work, task.connections), warmed_bytes=task.total_bytes)
        stored = os.fstat(image.fileno()).st_blocks * 512
        # A disk's file system may count a block of its own.
        _check(stored >= int(starts[-1]), task, f"{stored} bytes are allocated in the image, expected {starts[-1]}")
        _check_checksum(extents[task.checked].checksum(), task)
        return cost


def fetch_sdk(task: ClientTask) -> Cost:
    """``read_all()`` of the SDK in as many threads; nothing is stored."""
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
    """The program, which writes files: ``--parallel`` with as many connections. Its start is taken off."""
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
        # A token may be in it: only the owner's, and not among the arguments, which everybody may read.
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
        # At most half: a transfer of a few KiB takes no longer than the start.
        wall_s, cpu_s = (
            max(spent - off, spent / 2) for spent, off in ((cost.wall_s, start.wall_s), (cost.cpu_s, start.cpu_s))
        )
        return Cost(wall_s=wall_s, cpu_s=cpu_s, start_s=start.wall_s)


def drain(task: ClientTask) -> Cost:
    """Sockets whose bytes the kernel drops (``MSG_TRUNC``): how fast the server is, to a client that costs least."""
    numbers = _queued(len(task.names))
    sizes = [0] * len(task.names)

    def work() -> None:
        with contextlib.closing(_Drain()) as client:
            for number in _taken(numbers):
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
    """Connections, one to each address, kept open."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}
        self._buffer = bytearray(READ_BYTES)

    def get(self, url: str) -> int:
        """The size of the body, dropped; a redirect is followed."""
        parts = urlsplit(url)
        connection = self._sockets.get(parts.netloc)
        if connection is None:
            connection = socket.create_connection((parts.hostname or "", parts.port or 80))
            self._sockets[parts.netloc] = connection
        path = f"{parts.path}?{parts.query}"
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        status, headers = self._read_head(connection)
        num_bytes = left = int(headers["content-length"])
        while left:
            dropped = connection.recv_into(self._buffer, min(left, READ_BYTES), socket.MSG_TRUNC)
            if not dropped:
                raise ConnectionError(f"'{url}' ended {left} bytes early")
            left -= dropped
        if status == 301:
            return self.get(headers["location"])
        if status != 200:
            raise ConnectionError(f"'{url}' answered {status}")
        return num_bytes

    @staticmethod
    def _read_head(connection: socket.socket) -> tuple[int, dict[str, str]]:
        head = b""
        # One byte past the head would be lost to the count: looked at first, then read to its end exactly.
        while (stop := head.find(b"\r\n\r\n")) < 0:
            seen = connection.recv(READ_BYTES, socket.MSG_PEEK)
            if len(seen) == len(head):
                raise ConnectionError("the server closed the connection in place of an answer")
            head = seen
        connection.recv(stop + 4)
        first, *lines = head[:stop].decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()


def find_curl() -> str | None:
    """Where the program is, ``None`` where there is none."""
    return shutil.which("curl")


def _curl_access(connection: ClusterAccess) -> Iterator[str]:
    """Lines of its configuration: token and TLS as everybody's, from the SDK's environment variables."""
    if connection.proxy_for(connection.endpoint) is None:
        yield 'noproxy = "*"'
    if connection.token:
        # As with the SDK, a redirect to another host or port does not take it along.
        yield f"header = {_quoted(f'Authorization: Bearer {connection.token}')}"
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


def _queued(num: int) -> "queue.SimpleQueue[int]":
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(num):
        numbers.put(number)
    return numbers


def _taken(numbers: "queue.SimpleQueue[int]") -> Iterator[int]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield numbers.get_nowait()


def _in_threads(work: Callable[[], None], num: int) -> None:
    """Run it in so many threads; the first error is raised when all have ended."""
    errors: list[BaseException] = []

    def caught() -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 (raised below)
            errors.append(exc)

    threads = [threading.Thread(target=caught) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _check_sizes(sizes: Sequence[int], task: ClientTask) -> None:
    wrong = [(name, size) for name, size in zip(task.names, sizes, strict=True) if size != task.object_bytes]
    _check(not wrong, task, f"{len(wrong)} objects of another size than {task.object_bytes}, such as {wrong[:1]}")


def _check_checksum(found: int, task: ClientTask) -> None:
    name, expected = task.names[task.checked], task.checksums[task.checked]
    _check(found == expected, task, f"object '{name}' has the xxhash2 {found:016x}, expected {expected:016x}")


def _check(is_right: bool, task: ClientTask, found: str) -> None:
    if not is_right:
        raise DataError(f"client '{task.client}', bucket '{task.bucket}' at {task.endpoint}: {found}")


def main() -> int:
    """Do the task on stdin."""
    task = ClientTask(**json.load(sys.stdin))
    try:
        cost = CLIENTS[task.client](task)
    except PipesError as exc:
        print(exc, file=sys.stderr)
        return 1
    except Exception as exc:  # noqa: BLE001 (a client's own: it has one line in our error)
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(cost)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
