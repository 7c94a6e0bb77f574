"""Time bulk fetching: our transport, the SDK's ``raw()`` and the program curl, from one server, in turns.

The measurement is of the transfer only: it makes connections, follows redirects, receives bytes, and stores them if the
client does that. Imports, and the check of the bytes afterwards, are not included. The server is a process too, and
shares the machine's cores with each client. So its CPU time is measured as well.
"""

import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
from aistore import Client

from bench.engine.options import ListOption, cache_option, option
from bench.engine.scenario import Measured, Scenario
from bench.tools.folders import RunFolder, check_room
from bench.tools.processes import cpu_s_of, touch_memory
from dali_pipes.cache.extents import Extent, extent_starts
from dali_pipes.cache.placement import file_system
from dali_pipes.commands.options import size
from dali_pipes.errors import DataError, PipesError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.formats.manifest import checksum
from dali_pipes.progress import progress
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.access import ClusterAccess
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.endpoint import check_endpoint
from dali_pipes.store.cluster.objects import StoredObjects, object_url
from dali_pipes.store.http.objects import ObjectFetcher

MIB = 1 << 20
GIB = 1 << 30
PREFIX = "dali-pipes-bench-fetch"
CURL_OPTIONS = ("--disable", "--parallel", "--parallel-immediate", "--location", "--fail", "--silent", "--show-error")


class Objects(NamedTuple):
    """The objects that clients fetch."""

    endpoint: str
    names: Sequence[str]
    object_bytes: int
    checksums: Sequence[int]
    directory: Path
    """The directory in which clients store what they fetch."""
    server_pid: int | None
    """``None``: the server is not ours."""
    connections: int
    bucket: str = PREFIX
    checked: int = 0
    """The index of the object whose bytes are hashed again after the clock has stopped."""

    @property
    def total_bytes(self) -> int:
        return self.object_bytes * len(self.names)

    def check(self, client: str, sizes: Sequence[int], found: int | None = None) -> None:
        """Refuse an object that has another size or checksum than expected."""
        where = f"client '{client}', bucket '{self.bucket}' at {self.endpoint}"
        for name, num_bytes in zip(self.names, sizes, strict=True):
            if num_bytes != self.object_bytes:
                raise DataError(f"{where}: object '{name}' has {num_bytes} bytes, expected {self.object_bytes}")
        if found not in (None, expected := self.checksums[self.checked]):
            name = self.names[self.checked]
            raise DataError(f"{where}: object '{name}' has the xxhash2 {found:016x}, expected {expected:016x}")


class Cost(NamedTuple):
    wall_s: float
    cpu_s: float


def find_curl() -> str | None:
    return shutil.which("curl")


@dataclass(frozen=True, kw_only=True)
class FetchScenario(Scenario[Objects, str, Measured]):
    """Fetch the same objects with our transport, the SDK and curl, in turns; print speed and CPU of each.

    Ours verifies checksums and stores into a cache file, the SDK's raw() keeps bytes in memory, curl writes files.
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
        factory=lambda: [name for name in CLIENTS if name != "curl" or find_curl()],
        type=ListOption(str),
        help="Comma separated: ours, sdk, curl.  [default: all that are there]",
    )
    work: Path | None = cache_option("Where fetched bytes are written; the own server keeps its objects there too.")
    endpoint: str | None = option(help="AIStore's proxy, to fetch from a cluster.  [default: a server of our own]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.clients or len(set(self.clients)) != len(self.clients) or set(self.clients) - CLIENTS.keys():
            raise ValueError(f"clients must be of {', '.join(CLIENTS)}, each once, got '{','.join(self.clients)}'")
        if "curl" in self.clients and find_curl() is None:
            raise ValueError("client 'curl': no such program in PATH; install it, or leave it out: --clients ours,sdk")
        # The files of one client at a time, and the objects if the server is ours.
        needed = self.object_bytes * self.num_objects * (1 if self.endpoint else 2)
        if self.work is not None:
            check_room(self.work, needed, what="fetching", option="--cache", less="take fewer or smaller objects")

    def prepare(self, folder: RunFolder, stack: ExitStack) -> Objects:
        server = None if self.endpoint else stack.enter_context(embedded_node.start(folder.new()))
        endpoint = server.endpoint if server is not None else str(self.endpoint)
        check_endpoint(endpoint)
        store = AisStore(endpoint, PREFIX)
        if store.exists():
            raise ValueError(
                f"bucket '{store.url}' is there already at {endpoint}: another benchmark runs, or one was killed; "
                "destroy the bucket, it holds nothing else"
            )
        store.create()
        stack.callback(store.client.bucket(PREFIX).delete, missing_ok=True)
        names, checksums = [], []
        block = bytearray(os.urandom(self.object_bytes))
        for number in progress(range(self.num_objects), what="make objects", unit="object"):
            # No two objects are equal: so a client that gets another object's bytes is noticed.
            label = number.to_bytes(8, "big")[-min(8, len(block)) :]
            block[: len(label)] = label
            names.append(f"{PREFIX}-{number:06d}")
            checksums.append(checksum(bytes(block)))
            store.write(names[-1], bytes(block))
        pid = None if server is None else server.pid
        return Objects(endpoint, names, self.object_bytes, checksums, folder.new(), pid, self.connections)

    def subjects(self, made: Objects) -> Sequence[str]:
        return self.clients

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
        return [f"Stored in {file_system(made.directory)}."]


def fetch_ours(task: Objects) -> Cost:
    """Fetch with one `ObjectFetcher` in each thread, into reserved extents of a sparse file; verify checksums."""
    starts = extent_starts([task.object_bytes] * len(task.names))
    access = ClusterAccess.from_environment(task.endpoint)
    with tempfile.TemporaryFile(dir=task.directory, buffering=0) as cache_file:
        file = cache_file.fileno()
        os.ftruncate(file, int(starts[-1]))
        extents = [Extent(file, int(start), task.object_bytes) for start in starts[:-1]]
        numbers = iter(range(len(task.names)))

        def work() -> None:
            with ObjectFetcher(StoredObjects(access, task.bucket)) as fetcher:
                for number in numbers:
                    # As the cache does: reserve the space before the bytes come.
                    os.posix_fallocate(file, int(starts[number]), int(starts[number + 1] - starts[number]))
                    fetcher.fetch([Wanted(task.names[number], extents[number], task.checksums[number])])

        cost = _timed(lambda: _in_threads(work, task.connections), task)
        task.check("ours", [task.object_bytes] * len(task.names), extents[task.checked].checksum_unless())
        return cost


def fetch_sdk(task: Objects) -> Cost:
    """Fetch with the SDK in as many threads, into memory; ``raw()`` takes less time than ``read_all()``."""
    bucket = Client(task.endpoint, max_pool_size=task.connections).bucket(task.bucket)
    sizes = [0] * len(task.names)
    kept: list[bytes] = []
    numbers = iter(range(len(task.names)))

    def work() -> None:
        for number in numbers:
            data: bytes = bucket.object(task.names[number]).get_reader().raw().read()
            sizes[number] = len(data)
            if number == task.checked:
                kept.append(data)

    cost = _timed(lambda: _in_threads(work, task.connections), task)
    task.check("sdk", sizes, xxhash.xxh64_intdigest(kept[0]))
    return cost


def fetch_curl(task: Objects) -> Cost:
    """Fetch with the program curl, ``--parallel`` with as many connections, into files."""
    access = ClusterAccess.from_environment(task.endpoint)
    with tempfile.TemporaryDirectory(dir=task.directory) as folder:
        paths = [Path(folder) / str(number) for number in range(len(task.names))]
        lines = [f"parallel-max = {task.connections}", *([f'cacert = "{access.ca}"'] if access.ca else [])]
        if access.proxy_for(access.endpoint) is None:
            lines.append('noproxy = "*"')
        if access.bearer:
            lines.append(f'header = "Authorization: Bearer {access.bearer}"')
        for name, path in zip(task.names, paths, strict=True):
            lines += [f'url = "{object_url(task.endpoint, task.bucket, name, provider="ais")}"', f'output = "{path}"']
        config = Path(folder) / "config"
        # It may hold a token: only the owner may read it, while all users could see the arguments.
        config.touch(mode=0o600)
        config.write_text("\n".join(lines) + "\n")

        def run() -> None:
            done = subprocess.run(  # noqa: S603 (curl, with our config)
                [find_curl() or "curl", *CURL_OPTIONS, "--config", str(config)],
                check=False,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise PipesError(f"curl failed, exit status {done.returncode}: {done.stderr.strip()}")

        cost = _timed(run, task, who=resource.RUSAGE_CHILDREN)
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        task.check("curl", sizes)
        task.check("curl", sizes, checksum(paths[task.checked].read_bytes()))
        return cost


CLIENTS: Mapping[str, Callable[[Objects], Cost]] = {"ours": fetch_ours, "sdk": fetch_sdk, "curl": fetch_curl}


def _timed(work: Callable[[], None], task: Objects, *, who: int = resource.RUSAGE_SELF) -> Cost:
    touch_memory(task.total_bytes)  # Note [cold memory]
    before, start = resource.getrusage(who), time.perf_counter()
    work()
    wall_s, after = time.perf_counter() - start, resource.getrusage(who)
    return Cost(wall_s, (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime))


def _in_threads(work: Callable[[], None], num: int) -> None:
    """Run a function in ``num`` threads; raise the first error when all have ended."""
    with ThreadPoolExecutor(num) as threads:
        for done in [threads.submit(work) for _ in range(num)]:
            done.result()
