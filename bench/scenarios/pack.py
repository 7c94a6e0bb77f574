"""Time packing: our command, and the programs tar and curl for the same members and shards, taking turns.

Both read the same files, a pets sample repeated to as many samples as are asked for, and write to one server: ours by
one command, from the interpreter's start to its summary line; tar into a file a shard, which curl uploads (``-T``)
before the next one is begun, and the same with as many shards in flight as ours has. Ours looks at every photo before,
verifies what the server stored, and keeps no file; tar and curl do nothing of the kind.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.environment import describe_environment
from bench.reports.report import Spread
from bench.reports.tables import format_rows
from bench.scenarios.fetch_client import find_curl
from bench.scenarios.warm import touch_memory
from bench.timing.object_server import ObjectServer, module_command, module_environment
from dali_pipes.cache.free_space import file_system
from dali_pipes.commands.options import format_bytes
from dali_pipes.errors import DataError, PipesError
from dali_pipes.progress import bar
from dali_pipes.store.ais import AisStore, check_endpoint
from prep.pack.pack import DEFAULT_MAX_BYTES
from prep.pack.plan import ShardPlan, plan_shards, tar_bytes
from prep.sources.pets import MASK, PHOTO, pets
from prep.workers import default_jobs

__all__ = ["PackOptions", "format_pack", "run_pack"]

MIB = 1 << 20
GIB = 1 << 30
PREFIX = "dali-pipes-bench-pack"
"""Of the bucket that is made, and of the folder."""
PACKER_NAMES = ("ours", "tar+curl", "tar+curl parallel")


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """What is packed, how often, and where to."""

    pets: Path
    """A directory in the layout of Oxford-IIIT Pet; its records are repeated."""
    num_samples: int = 10_000
    max_bytes: int = DEFAULT_MAX_BYTES
    """Of a shard."""
    jobs: int | None = None
    """Shards in flight, ours and of the parallel tar and curl; ``None``: as `prep pack` has it."""
    repeats: int = 5
    cache: Path = Path("/dev/shm")  # noqa: S108 (a directory of our own is made there)
    """Where the files, tar's shards, and the objects of the own server lie."""
    endpoint: str | None = None
    """A cluster; ``None``: the own server."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_bytes", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {self.jobs}")
        for program in ("tar", "bash"):
            if shutil.which(program) is None:
                raise ValueError(f"no program '{program}' in PATH; install it")
        if find_curl() is None:
            raise ValueError("no program 'curl' in PATH; install it")
        if not self.cache.is_dir():
            raise ValueError(f"--cache '{self.cache}': no such directory; name one with room for what is packed")


@dataclass(frozen=True, kw_only=True)
class _Turn:
    wall_s: float
    cpu_s: float
    """Of the packer and all that it started."""


@dataclass(frozen=True, kw_only=True)
class _Files:
    """What is packed, as each packer has it."""

    pets: Path
    """In Oxford's layout."""
    members: Path
    """The same files under their members' names, and one with each label."""
    lists: Sequence[Path]
    """Names of members, a file a shard."""
    shards: Sequence[ShardPlan]

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


def run_pack(options: PackOptions) -> dict[str, Any]:
    """Make files, have each packer pack all of them, ``repeats`` times in turns, each into an empty bucket.

    Returns:
        ``{"records": [{"packer", "samples_per_s", "mib_per_s", "cpu_s_per_gib", ...}], ...}``, for JSON.

    Raises:
        DataError: If a packer left other objects than were planned.
        PipesError: If a packer failed.
        StoreError: If the endpoint does not answer.
        ValueError: If there is too little room, or the bucket that is to be made is there already.
    """
    jobs = options.jobs or default_jobs()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}-", dir=options.cache)))
        files = _make_files(folder, options)
        endpoint = options.endpoint
        if endpoint is None:
            endpoint = stack.enter_context(ObjectServer(folder / "server")).endpoint
        check_endpoint(endpoint)
        store = AisStore(endpoint, PREFIX)
        if store.exists():
            raise ValueError(
                f"bucket '{store.url}' is there already at {endpoint}: another benchmark runs, or one was killed; "
                "destroy the bucket, it holds nothing else"
            )
        commands = {
            "ours": module_command(
                "prep", "pack", "pets", str(files.pets), store.url, "--endpoint", endpoint, "--jobs", str(jobs),
                "--max-bytes", str(options.max_bytes), "--json",
            ),
            "tar+curl": _tar_and_curl(folder, files, endpoint, jobs=1),
            "tar+curl parallel": _tar_and_curl(folder, files, endpoint, jobs=jobs),
        }  # fmt: skip
        turns: dict[str, list[_Turn]] = {packer: [] for packer in PACKER_NAMES}
        with bar(what="pack", total=options.repeats * len(PACKER_NAMES), unit="turn") as drawn:
            for _ in range(options.repeats):
                for packer in PACKER_NAMES:
                    with _bucket(store):
                        touch_memory(2 * files.num_bytes)  # Note [cold memory]
                        turns[packer].append(_take_turn(packer, commands[packer]))
                        _check(store, files, packer)
                    drawn.update(1)
        return {
            "records": [_record(packer, turns[packer], files, options) for packer in PACKER_NAMES],
            "num_samples": options.num_samples,
            "num_bytes": files.num_bytes,
            "num_shards": len(files.shards),
            "max_bytes": options.max_bytes,
            "jobs": jobs,
            "repeats": options.repeats,
            "cache": file_system(options.cache),
            "source": "own server" if options.endpoint is None else "AIStore",
            "environment": describe_environment(),
        }


def _make_files(folder: Path, options: PackOptions) -> _Files:
    """Copies of the sample's files, each under a name of its own, as often as needed."""
    records = pets(options.pets).records
    images, trimaps = folder / "pets" / "images", folder / "pets" / "annotations" / "trimaps"
    members = folder / "members"
    for made in (images, trimaps, members):
        made.mkdir(parents=True)
    rows, sizes, names = [], [], []
    with bar(what="make files", total=options.num_samples, unit="samples") as drawn:
        for number in range(options.num_samples):
            record = records[number % len(records)]
            key = f"{record.key.rpartition('_')[0]}_{number}"
            label = str(record.label)
            parts = {"cls": members / f"{key}.cls", PHOTO: images / f"{key}.jpg", MASK: trimaps / f"{key}.png"}
            parts["cls"].write_text(label)
            for component in (PHOTO, MASK):
                source = record.components[component]
                assert isinstance(source, Path), "pets names files"
                if number == 0 or number % 1000 == 0:
                    _check_room(options, source)
                shutil.copyfile(source, parts[component])
                # tar packs a file whose other names it does not meet as a file.
                os.link(parts[component], members / f"{key}.{component}")
            rows.append(f"{key} {label} 1 1\n")
            names.append([f"{key}.{component}" for component in parts])
            sizes.append(sum(tar_bytes(f"{key}.{component}", path.stat().st_size) for component, path in parts.items()))
            drawn.update(1)
    (folder / "pets" / "annotations" / "list.txt").write_text("".join(rows))
    shards = plan_shards(sizes, max_count=options.num_samples, max_bytes=options.max_bytes)
    lists = []
    for number, shard in enumerate(shards):
        lists.append(folder / f"{number:06d}.list")
        lists[-1].write_text("".join(f"{name}\n" for row in names[shard.start : shard.stop] for name in row))
    return _Files(pets=folder / "pets", members=members, lists=lists, shards=shards)


def _check_room(options: PackOptions, source: Path) -> None:
    # Files, tar's shards, objects: three times what is packed, of which the sample's size is a good guess.
    needed = 3 * options.num_samples * source.stat().st_size
    free = shutil.disk_usage(options.cache).free
    if needed > 2 * free:
        raise ValueError(
            f"--cache '{options.cache}' has {format_bytes(free)} free, some {format_bytes(needed)} are needed; "
            "name another directory, or take fewer samples"
        )


def _tar_and_curl(folder: Path, files: _Files, endpoint: str, *, jobs: int) -> list[str]:
    """A shell's script: a shard is made, uploaded and deleted, ``jobs`` at a time."""
    one = "; ".join(
        (
            "set -e",
            f"tar -C {shlex.quote(str(files.members))} -cf {shlex.quote(str(folder))}/$0.tar "
            f"-T {shlex.quote(str(folder))}/$0.list",
            f"curl --disable --noproxy '*' -sSf -L -o /dev/null -T {shlex.quote(str(folder))}/$0.tar "
            f"{endpoint}/v1/objects/{PREFIX}/samples-$0.tar",
            f"rm {shlex.quote(str(folder))}/$0.tar",
        )
    )
    numbers = " ".join(path.stem for path in files.lists)
    return ["bash", "-c", f"printf '%s\\n' {numbers} | xargs -P {jobs} -n 1 bash -c {shlex.quote(one)}"]


@contextlib.contextmanager
def _bucket(store: AisStore) -> Iterator[None]:
    store.create()
    try:
        yield
    finally:
        with store.asking(store.url):
            store.client.bucket(PREFIX).delete(missing_ok=True)


def _take_turn(packer: str, command: Sequence[str]) -> _Turn:
    with tempfile.TemporaryFile() as said:
        started = perf_counter()
        process = subprocess.Popen(  # noqa: S603 (our own module, and a script of ours)
            command, stdout=subprocess.DEVNULL, stderr=said, env=module_environment()
        )
        # Not `wait()`: what it spent, with all that it waited for itself.
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise PipesError(f"packer '{packer}' failed: {said.read().decode(errors='replace').strip()}")
    return _Turn(wall_s=wall_s, cpu_s=usage.ru_utime + usage.ru_stime)


def _check(store: AisStore, files: _Files, packer: str) -> None:
    expected = [(f"samples-{number:06d}.tar", shard.num_bytes) for number, shard in enumerate(files.shards)]
    found = [(entry.name, entry.size) for entry in store.list("samples-0")]
    if found != expected:
        raise DataError(f"packer '{packer}' left the objects {found}, expected {expected}")


def _record(packer: str, turns: Sequence[_Turn], files: _Files, options: PackOptions) -> dict[str, Any]:
    figures = {
        "samples_per_s": [options.num_samples / turn.wall_s for turn in turns],
        "mib_per_s": [files.num_bytes / MIB / turn.wall_s for turn in turns],
        "cpu_s_per_gib": [turn.cpu_s / (files.num_bytes / GIB) for turn in turns],
    }
    spreads = {name: Spread.of(values) for name, values in figures.items()}
    return {
        "packer": packer,
        **{name: spread.median for name, spread in spreads.items()},
        "spread": {name: [spread.min, spread.max] for name, spread in spreads.items()},
        "repeats": [asdict(turn) for turn in turns],
    }


def format_pack(report: dict[str, Any]) -> str:
    """A row a packer, and the ratio that counts."""
    rows = [["packer", "samples/s", "MiB/s", "CPU-s/GiB"]]
    rows += [
        [
            record["packer"],
            _spread_text(record, "samples_per_s", digits=0),
            _spread_text(record, "mib_per_s", digits=0),
            _spread_text(record, "cpu_s_per_gib", digits=2),
        ]
        for record in report["records"]
    ]
    speeds = {record["packer"]: record["samples_per_s"] for record in report["records"]}
    lines = [format_rows(rows), ""]
    lines += [
        f"ours reaches {speeds['ours'] / speeds[other]:.2f} of the speed of {other}" for other in PACKER_NAMES[1:]
    ]
    return "\n".join(lines)


def _spread_text(record: dict[str, Any], figure: str, *, digits: int) -> str:
    low, high = record["spread"][figure]
    return f"{record[figure]:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
