"""Time bulk fetching: our transport, the SDK's ``read_all()`` and the program curl, from one server, in turns.

The measurement is of the transfer only: it makes connections, follows redirects, receives bytes, and stores them if the
client does that. Ours verifies each checksum and stores into a cache file. curl stores into files and verifies nothing.
The SDK does neither. Imports, and the check of the bytes afterwards, are not included. The server is a process too, and
shares the machine's cores with each client. So its CPU time is measured as well, and `drain`, a client that makes the
kernel drop the bytes, shows how fast the server is when the client costs almost nothing.
"""

import http.client
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import xxhash

from bench.engine.options import ListOption, cache_option, option
from bench.engine.scenario import Measured, Scenario
from bench.tools.buckets import new_bucket
from bench.tools.folders import RunFolder, check_room
from bench.tools.processes import cpu_s_of, touch_memory
from dali_pipes.cache.extents import Extent, extent_starts
from dali_pipes.cache.free_space import file_system
from dali_pipes.commands.options import size
from dali_pipes.commands.output import print_note
from dali_pipes.errors import DataError, PipesError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.formats.manifest import checksum
from dali_pipes.progress import bar
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import ais_client
from dali_pipes.store.cluster.objects import StoredObjects, object_url
from dali_pipes.store.cluster.proxies import ClusterAccess
from dali_pipes.store.http.objects import ObjectFetcher

MIB = 1 << 20
GIB = 1 << 30
READ_BYTES = 1 << 20
PREFIX = "dali-pipes-bench-fetch"
"""The bucket that the benchmark makes, and the prefix of its objects."""
CLIENT_NAMES = ("ours", "sdk", "curl")
DRAIN = "drain"


class Objects(NamedTuple):
    """The objects that clients fetch."""

    endpoint: str
    names: Sequence[str]
    object_bytes: int
    checksums: Sequence[int]
    """XXH64 of each."""
    directory: Path
    """The directory in which clients store what they fetch."""
    server_pid: int | None
    """``None``: the server is not ours."""
    connections: int
    """Objects in flight."""
    bucket: str = PREFIX
    checked: int = 0
    """The index of the object whose bytes are hashed again after the clock has stopped."""

    @property
    def total_bytes(self) -> int:
        return self.object_bytes * len(self.names)

    def url(self, name: str) -> str:
        return object_url(self.endpoint, self.bucket, name, provider="ais")


class Cost(NamedTuple):
    """The cost of fetching all objects."""

    wall_s: float
    cpu_s: float
    """User and system time of all threads, or of the program."""


def _installed_clients() -> Sequence[str]:
    if find_curl() is not None:
        return CLIENT_NAMES
    print_note("no program 'curl' in PATH: left out")
    return CLIENT_NAMES[:2]


def find_curl() -> str | None:
    return shutil.which("curl")


@dataclass(frozen=True, kw_only=True)
class FetchScenario(Scenario[Objects, str, Measured]):
    """Fetch the same objects with our transport, the SDK and curl, in turns; print speed and CPU of each.

    Ours verifies checksums and stores into a cache file, the SDK's read_all() keeps bytes in memory, curl writes files.
    Makes the bucket ais://dali-pipes-bench-fetch, on a server of its own or on the cluster that --endpoint names, and
    destroys it at the end. Writes nothing else but the file that --json names.
    """

    kind = "fetch"
    title = "fetch"
    ratio_to = "sdk"

    # As the shards that AIStore and WebDataset recommend, at their small end.
    object_bytes: int = option("64MiB", type=size, help="Bytes an object.")
    # 1 GiB a turn: half a second for the fastest.
    num_objects: int = option(16, help="Objects a turn.")
    connections: int = option(8, help="Objects in flight.")
    repeats: int = option(5, help="Turns of each client.")
    clients: Sequence[str] = option(
        factory=_installed_clients,
        type=ListOption(str),
        help=f"Comma separated: {', '.join(CLIENT_NAMES)}.  [default: all that are there]",
    )
    work: Path | None = cache_option("Where fetched bytes are written; the own server keeps its objects there too.")
    endpoint: str | None = option(help="AIStore's proxy, to fetch from a cluster.  [default: a server of our own]")

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.clients
        if unknown := [name for name in names if name not in CLIENT_NAMES]:
            raise ValueError(f"clients must be among {', '.join(CLIENT_NAMES)}, got '{unknown[0]}'")
        if not names or len(set(names)) != len(names):
            raise ValueError(f"clients must name each client once, got '{','.join(names)}'")
        if "curl" in names and find_curl() is None:
            others = ",".join(name for name in names if name != "curl") or "ours"
            raise ValueError(f"client 'curl': no such program in PATH; install it, or pass --clients {others}")
        # The files of one client at a time, and the objects if the server is ours.
        needed = self.object_bytes * self.num_objects * (1 if self.endpoint else 2)
        if self.work is not None:
            check_room(self.work, needed, what="fetching", option="--cache", less="take fewer or smaller objects")

    def prepare(self, folder: RunFolder, stack: ExitStack) -> Objects:
        """Make objects in a bucket of their own, which is destroyed at the end.

        Raises:
            StoreError: If the endpoint does not answer.
            ValueError: If the bucket exists already.
        """
        server = None if self.endpoint else stack.enter_context(embedded_node.start(folder.new()))
        endpoint = server.endpoint if server is not None else str(self.endpoint)
        store = stack.enter_context(new_bucket(endpoint, PREFIX))
        names, checksums = [], []
        block = bytearray(os.urandom(self.object_bytes))
        with bar(what="make objects", total=self.object_bytes * self.num_objects, unit="B") as drawn:
            for number in range(self.num_objects):
                # No two objects are equal: so a client that gets another object's bytes is noticed.
                label = number.to_bytes(8, "big")[-min(8, len(block)) :]
                block[: len(label)] = label
                names.append(f"{PREFIX}-{number:06d}")
                data = bytes(block)
                checksums.append(checksum(data))
                store.write(names[-1], data)
                drawn.update(len(data))
        pid = None if server is None else server.pid
        return Objects(endpoint, names, self.object_bytes, checksums, folder.new(), pid, self.connections)

    def subjects(self, made: Objects) -> Sequence[str]:
        """The clients, and `drain` if the server is ours."""
        return [*self.clients, *([DRAIN] if made.server_pid is not None else [])]

    def name_of(self, subject: str) -> str:
        return f"client '{subject}'"

    def measure(self, made: Objects, subject: str, number: int) -> Measured:
        task = made._replace(checked=number % len(made.names))
        before = 0.0 if made.server_pid is None else cpu_s_of(made.server_pid)
        cost = CLIENTS[subject](task)
        figures: dict[str, float] = {
            "mib_per_s": made.total_bytes / MIB / cost.wall_s,
            "cpu_s_per_gib": cost.cpu_s / made.total_bytes * GIB,
        }
        if made.server_pid is not None:
            # 1.0 is one core's whole time. The kernel counts the server's in ticks of 10 ms.
            server_s = cpu_s_of(made.server_pid) - before
            figures |= {"server_cpu_s_per_gib": server_s / made.total_bytes * GIB}
            figures |= {"server_cores": server_s / cost.wall_s}
        return {"figures": figures, **cost._asdict()}

    def options_json(self) -> dict[str, Any]:
        return {**super().options_json(), "endpoint": None, "source": "AIStore" if self.endpoint else "own server"}

    def notes(self, made: Objects, rounds: Any) -> list[str]:
        alone = f"{DRAIN}: the kernel drops the bytes. A client that comes close to it may be limited by the server."
        return [f"Stored in {file_system(made.directory)}.", *([] if made.server_pid is None else [alone])]


def fetch_ours(task: Objects) -> Cost:
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
        _check_checksum(extents[task.checked].checksum(), task, "ours")
        return cost


def fetch_sdk(task: Objects) -> Cost:
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
    _check_sizes(sizes, task, "sdk")
    _check_checksum(xxhash.xxh64_intdigest(kept[0]), task, "sdk")
    return cost


def fetch_curl(task: Objects) -> Cost:
    """Fetch with the program curl, ``--parallel`` with as many connections, into files."""
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
        cost = _timed(lambda: _run(command), children=True, warmed_bytes=task.total_bytes)
        _check_sizes([path.stat().st_size if path.exists() else 0 for path in paths], task, "curl")
        with paths[task.checked].open("rb") as stream:
            _check_checksum(checksum(stream.read()), task, "curl")
        return cost


def drain(task: Objects) -> Cost:
    """Let the kernel drop the bytes (``MSG_TRUNC``): shows the server's speed with a client that costs least."""
    numbers = iter(range(len(task.names)))
    sizes = [0] * len(task.names)

    def work() -> None:
        connections: dict[str, http.client.HTTPConnection] = {}
        buffer = bytearray(READ_BYTES)
        try:
            for number in numbers:
                sizes[number] = _drained(task.url(task.names[number]), connections, buffer)
        finally:
            for connection in connections.values():
                connection.close()

    cost = _timed(lambda: _in_threads(work, task.connections), warmed_bytes=task.total_bytes)
    _check_sizes(sizes, task, DRAIN)
    return cost


def _drained(url: str, connections: dict[str, http.client.HTTPConnection], buffer: bytearray) -> int:
    """Follow redirects over one connection to each address, drop the body, and return its size."""
    parts = urlsplit(url)
    connection = connections.setdefault(parts.netloc, http.client.HTTPConnection(parts.netloc))
    connection.request("GET", f"{parts.path}?{parts.query}")
    answer = connection.getresponse()
    if answer.status == 301:
        answer.read()
        return _drained(answer.headers["location"], connections, buffer)
    if answer.status != 200:
        raise ConnectionError(f"'{url}' answered {answer.status}")
    num_bytes = int(answer.headers["content-length"])
    # The head was read together with the first bytes of the body.
    remaining = num_bytes - len(answer.read(min(num_bytes, len(answer.fp.peek()))))
    while remaining:
        dropped = connection.sock.recv_into(buffer, min(remaining, READ_BYTES), socket.MSG_TRUNC)
        if not dropped:
            raise ConnectionError(f"'{url}' ended {remaining} bytes early")
        remaining -= dropped
    answer.close()
    return num_bytes


CLIENTS: Mapping[str, Callable[[Objects], Cost]] = {
    "ours": fetch_ours, "sdk": fetch_sdk, "curl": fetch_curl, DRAIN: drain,
}  # fmt: skip


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
    return Cost(wall_s, (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime))


def _in_threads(work: Callable[[], None], num: int) -> None:
    """Run a function in ``num`` threads; raise the first error when all have ended."""
    with ThreadPoolExecutor(num) as threads:
        for done in [threads.submit(work) for _ in range(num)]:
            done.result()


def _check_sizes(sizes: Sequence[int], task: Objects, client: str) -> None:
    wrong = [(name, size) for name, size in zip(task.names, sizes, strict=True) if size != task.object_bytes]
    if wrong:
        raise DataError(
            f"client '{client}', bucket '{task.bucket}' at {task.endpoint}: {len(wrong)} objects of another size than "
            f"{task.object_bytes}, such as {wrong[:1]}"
        )


def _check_checksum(found: int, task: Objects, client: str) -> None:
    name, expected = task.names[task.checked], task.checksums[task.checked]
    if found != expected:
        raise DataError(
            f"client '{client}', bucket '{task.bucket}' at {task.endpoint}: object '{name}' has the xxhash2 "
            f"{found:016x}, expected {expected:016x}"
        )
