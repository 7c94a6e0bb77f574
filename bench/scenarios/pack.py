"""Time packing: our command, and the programs tar and curl for the same members and shards, in turns.

All read the same files, which repeat the samples of a pets directory, and write to one server. Ours is one command,
timed from the interpreter's start to its summary line. tar writes one file for each shard, and curl uploads it (``-T``)
before tar begins the next one; the third packer does the same with as many shards in flight as ours has. Ours checks
every photo first, verifies what the server stored, and keeps no file. tar and curl do none of this.
"""

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Literal

import click

from bench.engine.options import at_least, cache_option, option
from bench.engine.scenario import Rounds, Scenario
from bench.reports.figures import Figure
from bench.reports.tables import records_table, summarised
from bench.tools.buckets import new_bucket
from bench.tools.folders import RunFolder, check_room
from bench.tools.memory import touch_memory
from dali_pipes.cache.free_space import file_system
from dali_pipes.commands.options import size
from dali_pipes.errors import DataError, PipesError
from dali_pipes.processes.programs import own_program
from dali_pipes.progress import bar
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.ais import AisStore
from prep.pack.pack import DEFAULT_MAX_BYTES
from prep.pack.plan import ShardPlan, plan_shards, tar_bytes
from prep.sources.pets import MASK, PHOTO, pets
from prep.workers import default_jobs

MIB = 1 << 20
GIB = 1 << 30
PREFIX = "dali-pipes-bench-pack"
"""The bucket that the benchmark makes."""
PACKER_NAMES = ("ours", "tar+curl", "tar+curl parallel")
FIGURES = {
    "samples_per_s": Figure(title="samples/s", unit="samples/s", better="high", digits=0, about="Samples packed."),
    "mib_per_s": Figure(title="MiB/s", unit="MiB/s", better="high", digits=0, about="Bytes of the shards a second."),
    "cpu_s_per_gib": Figure(title="CPU-s/GiB", unit="s", better="low", digits=2, about="CPU time of all processes."),
}


@dataclass(frozen=True, kw_only=True)
class PackTurn:
    """The cost of packing everything once."""

    wall_s: float
    cpu_s: float
    """CPU seconds of the packer and all processes that it started."""


@dataclass(frozen=True, kw_only=True)
class PackInputs:
    """The same files, in the form that each packer needs."""

    folder: Path
    pets: Path
    """A directory with the layout of Oxford-IIIT Pet."""
    members: Path
    """The same files under their members' names, and a file with each label."""
    lists: Sequence[Path]
    """One file for each shard, with the names of its members."""
    shards: Sequence[ShardPlan]
    endpoint: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.num_bytes for shard in self.shards)


@dataclass(frozen=True, kw_only=True)
class PackScenario(Scenario[PackInputs, str, PackTurn]):
    """Pack the same files with `prep pack`, and with tar and curl, in turns; print speed and CPU of each.

    Makes the bucket ais://dali-pipes-bench-pack, on a server of its own or on the cluster that --endpoint names, and
    destroys it at the end. Writes nothing else but the files under --cache, and the one that --json names.
    """

    kind = "pack"
    title = "pack"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"  # a packer is a program
    figures = FIGURES

    pets: Path = option(
        MISSING,
        type=click.Path(path_type=Path),
        help="A directory in the layout of Oxford-IIIT Pet; its records are repeated.",
    )
    num_samples: int = option(10_000, name="--samples", help="Samples to pack.")
    max_bytes: int = option(f"{DEFAULT_MAX_BYTES // MIB}MiB", type=size, help="Bytes a shard.")
    # For our packer, and for tar and curl in parallel.
    jobs: int | None = option(type=at_least(1), help="Shards in flight.  [default: the cores, at most 16]")
    repeats: int = option(5, help="Turns of each packer.")
    work: Path | None = cache_option(
        "Where the files and tar's shards are written; the own server keeps its objects there too."
    )
    endpoint: str | None = option(help="AIStore's proxy, to pack to a cluster.  [default: a server of our own]")

    def __post_init__(self) -> None:
        super().__post_init__()
        for program in ("tar", "bash", "curl"):
            if shutil.which(program) is None:
                raise ValueError(f"no program '{program}' in PATH; install it")

    @property
    def num_jobs(self) -> int:
        return self.jobs or default_jobs()

    def prepare(self, folder: RunFolder, stack: ExitStack) -> PackInputs:
        """Copy the samples' files, each copy under its own name, and start a server.

        Raises:
            StoreError: If the endpoint does not answer.
            ValueError: If there is too little space, or the bucket to be made exists already.
        """
        place = folder.new()
        pets_made, members, lists, shards = self._make_files(place)
        endpoint = self.endpoint or stack.enter_context(embedded_node.start(folder.new())).endpoint
        with new_bucket(endpoint, PREFIX):
            pass  # only to see that the bucket can be made
        return PackInputs(folder=place, pets=pets_made, members=members, lists=lists, shards=shards, endpoint=endpoint)

    def _make_files(self, folder: Path) -> tuple[Path, Path, list[Path], list[ShardPlan]]:
        records = pets(self.pets).records
        images, trimaps = folder / "pets" / "images", folder / "pets" / "annotations" / "trimaps"
        members = folder / "members"
        for made in (images, trimaps, members):
            made.mkdir(parents=True)
        rows, sizes, names = [], [], []
        with bar(what="make files", total=self.num_samples, unit="samples") as drawn:
            for number in range(self.num_samples):
                record = records[number % len(records)]
                key = f"{record.key.rpartition('_')[0]}_{number}"
                label = str(record.label)
                parts = {"cls": members / f"{key}.cls", PHOTO: images / f"{key}.jpg", MASK: trimaps / f"{key}.png"}
                parts["cls"].write_text(label)
                for component in (PHOTO, MASK):
                    source = record.components[component]
                    assert isinstance(source, Path), "pets names files"
                    if number % 1000 == 0:
                        self._check_room(folder, source)
                    shutil.copyfile(source, parts[component])
                    # A hard link: tar packs it as a file, because the list does not have the file's other name.
                    os.link(parts[component], members / f"{key}.{component}")
                rows.append(f"{key} {label} 1 1\n")
                names.append([f"{key}.{component}" for component in parts])
                sizes.append(sum(tar_bytes(f"{key}.{name}", path.stat().st_size) for name, path in parts.items()))
                drawn.update(1)
        (folder / "pets" / "annotations" / "list.txt").write_text("".join(rows))
        shards = list(plan_shards(sizes, max_count=self.num_samples, max_bytes=self.max_bytes))
        lists = []
        for number, shard in enumerate(shards):
            lists.append(folder / f"{number:06d}.list")
            lists[-1].write_text("".join(f"{name}\n" for row in names[shard.start : shard.stop] for name in row))
        return folder / "pets", members, lists, shards

    def _check_room(self, folder: Path, source: Path) -> None:
        # Files, tar's shards and objects take three times the packed bytes. One sample's size is a guess that may be
        # twice too large, so half of that must be free.
        needed = 3 * self.num_samples * source.stat().st_size // 2
        check_room(folder, needed, what="packing", option="--cache", less="take fewer samples")

    def subjects(self, made: PackInputs) -> Sequence[str]:
        return PACKER_NAMES

    def name_of(self, subject: str) -> str:
        return f"packer '{subject}'"

    def measure(self, made: PackInputs, subject: str, number: int) -> PackTurn:
        """Pack everything into an empty bucket.

        Raises:
            DataError: If the packer left other objects than were planned.
            PipesError: If it failed.
        """
        with new_bucket(made.endpoint, PREFIX) as store:
            touch_memory(2 * made.num_bytes)  # Note [cold memory]
            turn = run_packer(subject, self._command(made, subject))
            _check_objects(store, made, subject)
        return turn

    def _command(self, made: PackInputs, packer: str) -> list[str]:
        if packer == "ours":
            return own_program(
                "prep", "pack", "pets", str(made.pets), f"ais://{PREFIX}", "--endpoint", made.endpoint,
                "--jobs", str(self.num_jobs), "--max-bytes", str(self.max_bytes), "--json",
            )  # fmt: skip
        return _tar_and_curl(made, jobs=self.num_jobs if packer == "tar+curl parallel" else 1)

    def speed(self, made: PackInputs, subject: str, row: PackTurn) -> str:
        return f"{self.num_samples / row.wall_s:,.0f} samples/s"

    def report(self, made: PackInputs, rounds: Rounds[str, PackTurn]) -> dict[str, Any]:
        """``{"records": [{"packer", "samples_per_s", "mib_per_s", "cpu_s_per_gib", ...}], ...}``."""
        return {
            "records": [self._record(packer, rounds.whole(packer), made.num_bytes) for packer in rounds.subjects],
            "num_samples": self.num_samples,
            "num_bytes": made.num_bytes,
            "num_shards": len(made.shards),
            "max_bytes": self.max_bytes,
            "jobs": self.num_jobs,
            "repeats": self.repeats,
            "cache": file_system(made.folder),
            "source": "own server" if self.endpoint is None else "AIStore",
        }

    def _record(self, packer: str, turns: Sequence[PackTurn], num_bytes: int) -> dict[str, Any]:
        figures = {
            "samples_per_s": [self.num_samples / turn.wall_s for turn in turns],
            "mib_per_s": [num_bytes / MIB / turn.wall_s for turn in turns],
            "cpu_s_per_gib": [turn.cpu_s / (num_bytes / GIB) for turn in turns],
        }
        return {"packer": packer, **summarised(figures), "repeats": [asdict(turn) for turn in turns]}

    @staticmethod
    def table(report: Any) -> str:
        """One row for each packer, then how fast ours is beside the others."""
        columns = {"packer": "packer", **{figure.title: name for name, figure in FIGURES.items()}}
        speeds = {record["packer"]: record["samples_per_s"] for record in report["records"]}
        lines = [records_table(report["records"], columns, FIGURES), ""]
        lines += [
            f"ours reaches {speeds['ours'] / speeds[other]:.2f} of the speed of {other}" for other in PACKER_NAMES[1:]
        ]
        return "\n".join(lines)


def _tar_and_curl(made: PackInputs, *, jobs: int) -> list[str]:
    """A shell script that makes, uploads and deletes each shard, ``jobs`` shards at a time."""
    place = shlex.quote(str(made.folder))
    one = "; ".join(
        (
            "set -e",
            f"tar -C {shlex.quote(str(made.members))} -cf {place}/$0.tar -T {place}/$0.list",
            f"curl --disable --noproxy '*' -sSf -L -o /dev/null -T {place}/$0.tar "
            f"{made.endpoint}/v1/objects/{PREFIX}/samples-$0.tar",
            f"rm {place}/$0.tar",
        )
    )
    numbers = " ".join(path.stem for path in made.lists)
    return ["bash", "-c", f"printf '%s\\n' {numbers} | xargs -P {jobs} -n 1 bash -c {shlex.quote(one)}"]


def run_packer(packer: str, command: Sequence[str]) -> PackTurn:
    """Run a packer's command to its end."""
    with tempfile.TemporaryFile() as said:
        started = perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)  # noqa: S603 (ours)
        # Not `wait()`: this also gives the CPU time of the process and of all processes that it waited for.
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise PipesError(f"packer '{packer}' failed: {said.read().decode(errors='replace').strip()}")
    return PackTurn(wall_s=wall_s, cpu_s=usage.ru_utime + usage.ru_stime)


def _check_objects(store: AisStore, made: PackInputs, packer: str) -> None:
    expected = [(f"samples-{number:06d}.tar", shard.num_bytes) for number, shard in enumerate(made.shards)]
    found = [(entry.name, entry.size) for entry in store.list("samples-0")]
    if found != expected:
        raise DataError(f"packer '{packer}' left the objects {found}, expected {expected}")
