"""Time bulk fetching: our transport, the SDK's ``read_all()`` and the program curl, from one server, in turns.

The server is a process too, and shares the machine's cores with each client. So its CPU time is measured as well, and
`drain`, a client that makes the kernel drop the bytes, shows how fast the server is when the client costs almost
nothing. Ours verifies each checksum and stores into a cache file. curl stores into files and verifies nothing. The SDK
does neither.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.engine.options import Listed, cache_option, option
from bench.engine.scenario import Rounds, Scenario
from bench.reports.figures import Figure
from bench.reports.tables import Columns, records_table, summarised
from bench.scenarios.fetch_client import CLIENTS, ClientTask, Cost, find_curl
from bench.tools.buckets import new_bucket
from bench.tools.folders import RunFolder, check_room
from bench.tools.processes import cpu_s_of
from dali_pipes.cache.free_space import file_system
from dali_pipes.commands.options import size
from dali_pipes.commands.output import print_note
from dali_pipes.formats.manifest import checksum
from dali_pipes.progress import bar
from dali_pipes.store.cluster import embedded_node

MIB = 1 << 20
GIB = 1 << 30
PREFIX = "dali-pipes-bench-fetch"
"""The bucket that the benchmark makes, and the prefix of its objects."""
CLIENT_NAMES = ("ours", "sdk", "curl")
DRAIN = "drain"
# If the server, as `drain` measures it, is less than this many times as fast as a client, it may limit that client.
HEADROOM = 1.1
FIGURES = {
    "mib_per_s": Figure(title="MiB/s", unit="MiB/s", better="high", digits=0, about="Bytes of the objects a second."),
    "cpu_s_per_gib": Figure(title="CPU-s/GiB", unit="s", better="low", digits=3, about="CPU time of the client."),
}


class _Objects(NamedTuple):
    """The objects that clients fetch."""

    endpoint: str
    names: Sequence[str]
    checksums: Sequence[int]
    directory: Path
    """The directory in which clients store what they fetch."""
    server_pid: int | None
    """``None``: the server is not ours."""


class _Turn(NamedTuple):
    cost: Cost
    server_cpu_s: float | None


def _installed_clients() -> Sequence[str]:
    if find_curl() is not None:
        return CLIENT_NAMES
    print_note("no program 'curl' in PATH: left out")
    return CLIENT_NAMES[:2]


@dataclass(frozen=True, kw_only=True)
class FetchScenario(Scenario[_Objects, str, _Turn]):
    """Fetch the same objects with our transport, the SDK and curl, in turns; print speed and CPU of each.

    Ours verifies checksums and stores into a cache file, the SDK's read_all() keeps bytes in memory, curl writes files.
    Makes the bucket ais://dali-pipes-bench-fetch, on a server of its own or on the cluster that --endpoint names, and
    destroys it at the end. Writes nothing else but the file that --json names.
    """

    kind = "fetch"
    title = "fetch"
    figures = FIGURES

    # As the shards that AIStore and WebDataset recommend, at their small end.
    object_bytes: int = option("64MiB", type=size, help="Bytes an object.")
    # 1 GiB a turn: half a second for the fastest.
    num_objects: int = option(16, help="Objects a turn.")
    connections: int = option(8, help="Objects in flight.")
    repeats: int = option(5, help="Turns of each client.")
    clients: Sequence[str] = option(
        factory=_installed_clients,
        type=Listed(str),
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
        needed = self.total_bytes * (1 if self.endpoint else 2)
        if self.work is not None:
            check_room(self.work, needed, what="fetching", option="--cache", less="take fewer or smaller objects")

    @property
    def total_bytes(self) -> int:
        """Bytes of one turn."""
        return self.object_bytes * self.num_objects

    def prepare(self, folder: RunFolder, stack: ExitStack) -> _Objects:
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
        with bar(what="make objects", total=self.total_bytes, unit="B") as drawn:
            for number in range(self.num_objects):
                # No two objects are equal: so a client that gets another object's bytes is noticed.
                label = number.to_bytes(8, "big")[-min(8, len(block)) :]
                block[: len(label)] = label
                names.append(f"{PREFIX}-{number:06d}")
                data = bytes(block)
                checksums.append(checksum(data))
                store.write(names[-1], data)
                drawn.update(len(data))
        return _Objects(endpoint, names, checksums, folder.new(), None if server is None else server.pid)

    def subjects(self, made: _Objects) -> Sequence[str]:
        """The clients, and `drain` if the server is ours."""
        return [*self.clients, *([DRAIN] if made.server_pid is not None else [])]

    def name_of(self, subject: str) -> str:
        return f"client '{subject}'"

    def measure(self, made: _Objects, subject: str, number: int) -> _Turn:
        task = ClientTask(
            client=subject,
            endpoint=made.endpoint,
            bucket=PREFIX,
            names=made.names,
            object_bytes=self.object_bytes,
            checksums=made.checksums,
            connections=self.connections,
            directory=str(made.directory),
            checked=number % len(made.names),
        )
        if made.server_pid is None:
            return _Turn(CLIENTS[subject](task), None)
        before = cpu_s_of(made.server_pid)
        cost = CLIENTS[subject](task)
        return _Turn(cost, cpu_s_of(made.server_pid) - before)

    def speed(self, made: _Objects, subject: str, row: _Turn) -> str:
        return f"{self.total_bytes / MIB / row.cost.wall_s:,.0f} MiB/s"

    def report(self, made: _Objects, rounds: Rounds[str, _Turn]) -> dict[str, Any]:
        """``{"records": [{"client", "mib_per_s", "cpu_s_per_gib", ...}], "server": {...} or None, ...}``."""
        records = {client: self._record(client, rounds.whole(client)) for client in rounds.subjects}
        server = records.pop(DRAIN, None)
        if server is not None:
            fastest = max(record["mib_per_s"] for record in records.values())
            server["times_fastest_client"] = server["mib_per_s"] / fastest
        return {
            "records": list(records.values()),
            "server": server,
            "connections": self.connections,
            "object_bytes": self.object_bytes,
            "num_objects": self.num_objects,
            "repeats": self.repeats,
            "cache": file_system(made.directory),
            "source": "AIStore" if server is None else "own server",
        }

    def _record(self, client: str, turns: Sequence[_Turn]) -> dict[str, Any]:
        gib = self.total_bytes / GIB
        record = {
            "client": client,
            **summarised(
                {
                    "mib_per_s": [self.total_bytes / MIB / turn.cost.wall_s for turn in turns],
                    "cpu_s_per_gib": [turn.cost.cpu_s / gib for turn in turns],
                }
            ),
            "repeats": [asdict(turn.cost) for turn in turns],
        }
        spent = [(turn.server_cpu_s, turn.cost.wall_s) for turn in turns if turn.server_cpu_s is not None]
        if spent:
            record["server_cpu_s_per_gib"] = median(cpu_s for cpu_s, _ in spent) / gib
            # 1.0 is one core's whole time. The kernel counts the server's in ticks of 10 ms.
            record["server_busy_cores"] = median(cpu_s / wall_s for cpu_s, wall_s in spent)
        return record

    @staticmethod
    def table(report: Any) -> str:
        """Return one row for each client and one for the server alone, then the ratios between them."""
        records = {record["client"]: record for record in report["records"]}
        server = report["server"]
        columns: Columns = {
            "client": "client",
            "MiB/s": "mib_per_s",
            "CPU-s/GiB": "cpu_s_per_gib",
            "server CPU-s/GiB": lambda one: f"{one['server_cpu_s_per_gib']:.3f}" if server else "-",
            "server cores busy": lambda one: f"{one['server_busy_cores']:.2f}" if server else "-",
        }
        rows = [*report["records"], *([{**server, "client": "(server alone)"}] if server else [])]
        lines = [records_table(rows, columns, FIGURES), ""]
        if {"ours", "sdk"} <= records.keys():
            share = records["ours"]["cpu_s_per_gib"] / records["sdk"]["cpu_s_per_gib"]
            lines.append(f"ours takes {share:.3f} of the CPU of the SDK's read_all()")
        if {"ours", "curl"} <= records.keys():
            speed = records["ours"]["mib_per_s"] / records["curl"]["mib_per_s"]
            lines.append(f"ours reaches {speed:.2f} of curl's MiB/s")
        if server:
            times = server["times_fastest_client"]
            verdict = "" if times >= HEADROOM else ": it may be what limits them"
            lines.append(f"the server alone, its bytes dropped, is {times:.2f} times the fastest client{verdict}")
        return "\n".join(lines)
