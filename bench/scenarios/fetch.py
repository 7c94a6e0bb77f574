"""Time bulk fetching: our transport, the SDK's ``read_all()`` and the program curl, from one server, taking turns.

Every turn is a process of its own (`bench.scenarios.fetch_client`). The server is a process too, and shares the
machine's cores with each client, so what it spends is measured beside; `drain`, a client that has the kernel drop the
bytes, shows how fast it is when the client costs nearly nothing. Ours verifies each checksum and stores into an image,
curl stores into files and verifies nothing, the SDK does neither.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.environment import describe_environment
from bench.reports.report import Spread
from bench.reports.tables import format_rows
from bench.scenarios.fetch_client import ClientTask, Cost, find_curl
from bench.timing.object_server import ObjectServer, module_command, module_environment
from dali_pipes.cache.free_space import file_system
from dali_pipes.commands.options import format_bytes
from dali_pipes.errors import PipesError
from dali_pipes.formats.column_file import checksum
from dali_pipes.progress import bar
from dali_pipes.store.ais import AisStore, check_endpoint

__all__ = ["FetchOptions", "format_fetch", "run_fetch"]

MIB = 1 << 20
GIB = 1 << 30
PREFIX = "dali-pipes-bench-fetch"
"""Of the bucket and the objects that are made."""
CLIENT_NAMES = ("ours", "sdk", "curl")
DRAIN = "drain"
# A server whose free capacity, seen by `drain`, is less than this many times what a client reached, is no yardstick.
HEADROOM = 1.1


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """What is fetched, by whom, how often."""

    object_bytes: int = 64 * MIB
    """As the shards that AIStore and WebDataset recommend, at their small end."""
    num_objects: int = 16
    """1 GiB a turn: half a second for the fastest."""
    connections: int = 8
    repeats: int = 5
    clients: Sequence[str] = CLIENT_NAMES
    cache: Path = Path("/dev/shm")  # noqa: S108 (a directory of our own is made there)
    """Where images and files are written, and the own server keeps its objects."""
    endpoint: str | None = None
    """A cluster; ``None``: the own server."""

    def __post_init__(self) -> None:
        for name in ("object_bytes", "num_objects", "connections", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if unknown := [name for name in self.clients if name not in CLIENT_NAMES]:
            raise ValueError(f"clients must be some of {', '.join(CLIENT_NAMES)}, got '{unknown[0]}'")
        if not self.clients or len(set(self.clients)) != len(self.clients):
            raise ValueError(f"clients must name each client once, got '{','.join(self.clients)}'")
        if "curl" in self.clients and find_curl() is None:
            others = ",".join(name for name in self.clients if name != "curl") or "ours"
            raise ValueError(f"client 'curl': no such program in PATH; install it, or pass --clients {others}")
        if not self.cache.is_dir():
            raise ValueError(f"--cache '{self.cache}': no such directory; name one with room for what is fetched")
        # One client's files at a time, and the objects where the server is ours.
        needed = self.total_bytes * (1 if self.endpoint else 2)
        free = shutil.disk_usage(self.cache).free
        if needed > free:
            raise ValueError(
                f"--cache '{self.cache}' has {format_bytes(free)} free, {format_bytes(needed)} are needed; "
                "name another directory, or take fewer or smaller objects"
            )

    @property
    def total_bytes(self) -> int:
        return self.object_bytes * self.num_objects


@dataclass(frozen=True)
class _Turn:
    cost: Cost
    server_cpu_s: float | None
    """`None` of a server that is not ours."""


def run_fetch(options: FetchOptions) -> dict[str, Any]:
    """Make objects, have each client fetch all of them, ``repeats`` times in turns.

    Returns:
        ``{"records": [{"client", "mib_per_s", "cpu_s_per_gib", ...}], "server": {...} or None, ...}``, for JSON.

    Raises:
        DataError: If a client got other bytes.
        PipesError: If a client failed.
        StoreError: If the endpoint does not answer.
        ValueError: If the bucket that is to be made at the endpoint is there already.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}-", dir=options.cache)))
        server: ObjectServer | None = None
        if options.endpoint is None:
            server = stack.enter_context(ObjectServer(folder / "server"))
        endpoint = options.endpoint or (server.endpoint if server else "")
        names, checksums = stack.enter_context(_objects(endpoint, options))
        order = [*options.clients, *([DRAIN] if server is not None else [])]
        turns: dict[str, list[_Turn]] = {client: [] for client in order}
        with bar(what="fetch", total=options.repeats * len(order), unit="turn") as drawn:
            for repeat in range(options.repeats):
                for client in order:
                    task = ClientTask(
                        client=client,
                        endpoint=endpoint,
                        bucket=PREFIX,
                        names=names,
                        object_bytes=options.object_bytes,
                        checksums=checksums,
                        connections=options.connections,
                        directory=str(folder),
                        checked=repeat % len(names),
                    )
                    turns[client].append(_take_turn(task, server))
                    drawn.update(1)
    return {
        "records": [_record(client, turns[client], options) for client in options.clients],
        "server": _server_record(turns, options) if server is not None else None,
        "connections": options.connections,
        "object_bytes": options.object_bytes,
        "num_objects": options.num_objects,
        "repeats": options.repeats,
        "cache": file_system(options.cache),
        "source": "own server" if server is not None else "AIStore",
        "environment": describe_environment(),
    }


@contextlib.contextmanager
def _objects(endpoint: str, options: FetchOptions) -> Iterator[tuple[list[str], list[int]]]:
    """Names and checksums of objects in a bucket of their own, which is destroyed at the end."""
    check_endpoint(endpoint)
    store = AisStore(endpoint, PREFIX)
    if store.exists():
        raise ValueError(
            f"bucket '{store.url}' is there already at {endpoint}: another benchmark runs, or one was killed; "
            f"destroy the bucket, it holds nothing else"
        )
    store.create()
    try:
        names, checksums = [], []
        block = bytearray(os.urandom(options.object_bytes))
        with bar(what="make objects", total=options.total_bytes, unit="B") as drawn:
            for number in range(options.num_objects):
                # No two alike, so that no client can be given another's bytes unnoticed.
                label = number.to_bytes(8, "big")[-min(8, len(block)) :]
                block[: len(label)] = label
                names.append(f"{PREFIX}-{number:06d}")
                data = bytes(block)
                checksums.append(checksum(data))
                store.write(names[-1], data)
                drawn.update(len(data))
        yield names, checksums
    finally:
        with store.asking(store.url):
            store.client.bucket(PREFIX).delete(missing_ok=True)


def _take_turn(task: ClientTask, server: ObjectServer | None) -> _Turn:
    before = server.cpu_s() if server is not None else 0.0
    done = subprocess.run(  # noqa: S603 (our own interpreter and module)
        module_command("bench.scenarios.fetch_client"),
        input=json.dumps(asdict(task)),
        env=module_environment(),
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise PipesError(f"client '{task.client}' failed: {done.stderr.strip()}")
    cost = Cost(**json.loads(done.stdout))
    return _Turn(cost, server.cpu_s() - before if server is not None else None)


def _record(client: str, turns: Sequence[_Turn], options: FetchOptions) -> dict[str, Any]:
    gib = options.total_bytes / GIB
    figures = {
        "mib_per_s": [options.total_bytes / MIB / turn.cost.wall_s for turn in turns],
        "cpu_s_per_gib": [turn.cost.cpu_s / gib for turn in turns],
    }
    spreads = {name: Spread.of(values) for name, values in figures.items()}
    record = {
        "client": client,
        **{name: spread.median for name, spread in spreads.items()},
        "spread": {name: [spread.min, spread.max] for name, spread in spreads.items()},
        "repeats": [asdict(turn.cost) for turn in turns],
    }
    spent = [turn.server_cpu_s for turn in turns if turn.server_cpu_s is not None]
    if spent:
        shares = [cpu_s / turn.cost.wall_s for cpu_s, turn in zip(spent, turns, strict=True)]
        record["server_cpu_s_per_gib"] = Spread.of(spent).median / gib
        # 1.0 is one core's whole time. The kernel counts the server's in ticks of 10 ms.
        record["server_busy_cores"] = Spread.of(shares).median
    return record


def _server_record(turns: dict[str, list[_Turn]], options: FetchOptions) -> dict[str, Any]:
    """The server by itself, and whether it was ahead of every client."""
    record = _record(DRAIN, turns[DRAIN], options)
    fastest = max(_record(client, turns[client], options)["mib_per_s"] for client in options.clients)
    return {**record, "times_fastest_client": record["mib_per_s"] / fastest}


def format_fetch(report: dict[str, Any]) -> str:
    """A row a client, the server by itself, and the ratios that count."""
    records = {record["client"]: record for record in report["records"]}
    server = report["server"]
    rows = [["client", "MiB/s", "CPU-s/GiB", "server CPU-s/GiB", "server cores busy"]]
    rows += [
        [
            record["client"],
            _spread_text(record, "mib_per_s", digits=0),
            _spread_text(record, "cpu_s_per_gib", digits=3),
            f"{record['server_cpu_s_per_gib']:.3f}" if server else "-",
            f"{record['server_busy_cores']:.2f}" if server else "-",
        ]
        for record in [*report["records"], *([{**server, "client": "(server alone)"}] if server else [])]
    ]
    lines = [format_rows(rows), ""]
    if {"ours", "sdk"} <= records.keys():
        share = records["ours"]["cpu_s_per_gib"] / records["sdk"]["cpu_s_per_gib"]
        lines.append(f"ours takes {share:.3f} of the CPU of the SDK's read_all()")
    if {"ours", "curl"} <= records.keys():
        lines.append(f"ours reaches {records['ours']['mib_per_s'] / records['curl']['mib_per_s']:.2f} of curl's MiB/s")
    if server:
        times = server["times_fastest_client"]
        verdict = "" if times >= HEADROOM else ": it may be what limits them"
        lines.append(f"the server alone, its bytes dropped, is {times:.2f} times the fastest client{verdict}")
    return "\n".join(lines)


def _spread_text(record: dict[str, Any], figure: str, *, digits: int) -> str:
    low, high = record["spread"][figure]
    return f"{record[figure]:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
