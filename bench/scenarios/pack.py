"""Time packing: our command, and the programs tar and curl for the same members and shards, in turns.

All read the same files, a sample of pets repeated to as many samples as are asked for, and write to one server: ours by
one command, from the interpreter's start to its summary line; tar into a file a shard, which curl uploads (``-T``)
before the next one is begun, and the same with as many shards in flight as ours has. Ours first checks every photo,
verifies what the server stored, and keeps no file; tar and curl do nothing of the kind.
"""

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Literal

from bench.engine.scenario import MEMORY, Rounds, Scenario
from bench.reports.figures import Figure
from bench.reports.tables import format_rows, spread_cell, summarised
from bench.tools.folders import RunFolder, check_room
from bench.tools.memory import touch_memory
from bench.tools.object_server import ObjectServer, new_bucket
from bench.tools.server_process import module_command, module_environment
from dali_pipes.cache.free_space import file_system
from dali_pipes.errors import DataError, PipesError
from dali_pipes.progress import bar
from dali_pipes.store.cluster.ais import AisStore
from prep.pack.pack import DEFAULT_MAX_BYTES
from prep.pack.plan import ShardPlan, plan_shards, tar_bytes
from prep.sources.pets import MASK, PHOTO, pets
from prep.workers import default_jobs

MIB = 1 << 20
GIB = 1 << 30
PREFIX = "dali-pipes-bench-pack"
"""Of the bucket that is made."""
PACKER_NAMES = ("ours", "tar+curl", "tar+curl parallel")
FIGURES = {
    "samples_per_s": Figure(title="samples/s", unit="samples/s", better="high", digits=0, about="Samples packed."),
    "mib_per_s": Figure(title="MiB/s", unit="MiB/s", better="high", digits=0, about="Bytes of the shards a second."),
    "cpu_s_per_gib": Figure(title="CPU-s/GiB", unit="s", better="low", digits=2, about="CPU time of all processes."),
}


@dataclass(frozen=True, kw_only=True)
class PackTurn:
    """What packing everything once took."""

    wall_s: float
    cpu_s: float
    """Of the packer and all that it started."""


@dataclass(frozen=True, kw_only=True)
class PackInputs:
    """The same files, as each packer wants them."""

    folder: Path
    pets: Path
    """In the layout of Oxford-IIIT Pet."""
    members: Path
    """The same files under their members' names, and one with each label."""
    lists: Sequence[Path]
    """Names of members, a file a shard."""
    shards: Sequence[ShardPlan]
    endpoint: str

    @property
    def num_bytes(self) -> int:
        """Of all shards."""
        return sum(shard.num_bytes for shard in self.shards)


@dataclass(frozen=True, kw_only=True)
class PackScenario(Scenario[PackInputs, str, PackTurn]):
    """What is packed, how often, and where to."""

    kind = "pack"
    title = "pack"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"  # a packer is a program
    figures = FIGURES

    pets: Path
    """A directory in the layout of Oxford-IIIT Pet; its records are repeated."""
    num_samples: int = 10_000
    max_bytes: int = DEFAULT_MAX_BYTES
    """Of a shard."""
    jobs: int | None = None
    """Shards in flight, of ours and of the parallel tar and curl; ``None``: as many as `prep pack` has."""
    work: Path | None = MEMORY
    """Where the files, tar's shards, and the objects of the own server lie."""
    endpoint: str | None = None
    """A cluster; ``None``: the own server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for program in ("tar", "bash", "curl"):
            if shutil.which(program) is None:
                raise ValueError(f"no program '{program}' in PATH; install it")

    @property
    def num_jobs(self) -> int:
        """Shards in flight."""
        return self.jobs or default_jobs()

    def prepare(self, folder: RunFolder, stack: ExitStack) -> PackInputs:
        """Copies of the sample's files, each under a name of its own, and a server.

        Raises:
            StoreError: If the endpoint does not answer.
            ValueError: If there is too little space, or the bucket that is to be made is there already.
        """
        place = folder.new()
        pets_made, members, lists, shards = self._make_files(place)
        endpoint = self.endpoint or stack.enter_context(ObjectServer(folder.new())).endpoint
        with new_bucket(endpoint, PREFIX):
            pass  # it can be made
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
                    # A link, which tar packs as a file if it does not meet the file's other names.
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
        # Files, tar's shards, objects: three times what is packed. One sample's size is a guess, which may be twice
        # too large.
        needed = 3 * self.num_samples * source.stat().st_size // 2
        check_room(folder, needed, what="packing", option="--cache", less="take fewer samples")

    def subjects(self, made: PackInputs) -> Sequence[str]:
        """The packers."""
        return PACKER_NAMES

    def name_of(self, subject: str) -> str:
        """``packer 'ours'``."""
        return f"packer '{subject}'"

    def measure(self, made: PackInputs, subject: str, number: int) -> PackTurn:
        """Have the packer pack everything into an empty bucket.

        Raises:
            DataError: If it left other objects than were planned.
            PipesError: If it failed.
        """
        with new_bucket(made.endpoint, PREFIX) as store:
            touch_memory(2 * made.num_bytes)  # Note [cold memory]
            turn = run_packer(subject, self._command(made, subject))
            _check_objects(store, made, subject)
        return turn

    def _command(self, made: PackInputs, packer: str) -> list[str]:
        if packer == "ours":
            return module_command(
                "prep", "pack", "pets", str(made.pets), f"ais://{PREFIX}", "--endpoint", made.endpoint,
                "--jobs", str(self.num_jobs), "--max-bytes", str(self.max_bytes), "--json",
            )  # fmt: skip
        return _tar_and_curl(made, jobs=self.num_jobs if packer == "tar+curl parallel" else 1)

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
        """See `format_pack`."""
        return format_pack(report)


def _tar_and_curl(made: PackInputs, *, jobs: int) -> list[str]:
    """A shell's script: a shard is made, uploaded and deleted, ``jobs`` at a time."""
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
    return PackTurn(wall_s=wall_s, cpu_s=usage.ru_utime + usage.ru_stime)


def _check_objects(store: AisStore, made: PackInputs, packer: str) -> None:
    expected = [(f"samples-{number:06d}.tar", shard.num_bytes) for number, shard in enumerate(made.shards)]
    found = [(entry.name, entry.size) for entry in store.list("samples-0")]
    if found != expected:
        raise DataError(f"packer '{packer}' left the objects {found}, expected {expected}")


def format_pack(report: dict[str, Any]) -> str:
    """A row a packer, and how fast ours is beside the others."""
    rows = [["packer", "samples/s", "MiB/s", "CPU-s/GiB"]]
    rows += [
        [
            record["packer"],
            spread_cell(record, "samples_per_s", FIGURES),
            spread_cell(record, "mib_per_s", FIGURES),
            spread_cell(record, "cpu_s_per_gib", FIGURES),
        ]
        for record in report["records"]
    ]
    speeds = {record["packer"]: record["samples_per_s"] for record in report["records"]}
    lines = [format_rows(rows), ""]
    lines += [
        f"ours reaches {speeds['ours'] / speeds[other]:.2f} of the speed of {other}" for other in PACKER_NAMES[1:]
    ]
    return "\n".join(lines)
