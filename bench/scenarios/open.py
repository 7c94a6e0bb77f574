"""Open loaders of a bucket of up to a million shards, as one rank and as many ranks of a machine, and read from them.

The bucket is simulated (`bench.tools.simulated_bucket`) and answers as AIStore and as S3 do. Each turn starts new
interpreters, one for each rank, that import everything first; then all of them open a loader at the same time. When the
last one is open, their memory is measured; then each reads some batches. The server counts the requests: a loader must
not list the bucket. One more turn for each server lists the whole bucket, as `prep index` does.
"""

import itertools
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, NamedTuple

import psutil

from bench.engine.options import ListOption, cache_option, option
from bench.engine.scenario import Measured, Rounds, Scenario
from bench.engine.turn_process import DONE, Meet, TurnProcess, call_apart, meet, move_on
from bench.tools.folders import RunFolder
from bench.tools.simulated_bucket import BUCKET, PREFIX, SimulatedBucket, simulated_bucket
from dali_pipes.cache.placement import file_system
from dali_pipes.data_set.indexing import read_manifest
from dali_pipes.store.urls import open_store

NUM_BATCHES = 200
WINDOW_SHARDS = 10
FACES = {"ais": "AIStore", "s3": "S3"}


class Opening(NamedTuple):
    """What is measured together: loaders of so many ranks, or, with none, a listing."""

    server: str
    ranks: int


class OpenInputs(NamedTuple):
    bucket: SimulatedBucket
    cache: Path
    window_bytes: int


@dataclass(frozen=True, kw_only=True)
class OpenScenario(Scenario[OpenInputs, Opening, Measured]):
    """Open loaders of a simulated bucket of a million shards, list it, and read batches from it.

    Reads nothing but what a server of its own makes up. Writes nothing but the file that --json names.
    """

    kind = "open"
    title = "open"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"

    num_shards: int = option(1_000_000, help="Shards of the bucket.")
    shard_samples: int = option(1000, help="Samples of each shard.")
    ranks: Sequence[int] = option("1,8", type=ListOption(int), help="Numbers of ranks that open a loader at once.")
    faces: Sequence[str] = option("ais,s3", type=ListOption(str), help="Whose answers the server gives: ais, s3.")
    repeats: int = option(3, help="Turns of each.")
    work: Path | None = cache_option("Where the cache files lie.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := set(self.faces) - FACES.keys():
            raise ValueError(f"faces must be of {', '.join(FACES)}, got '{min(unknown)}'")
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"ranks must be positive numbers, got {','.join(map(str, self.ranks)) or 'none'}")

    def prepare(self, folder: RunFolder, stack: ExitStack) -> OpenInputs:
        bucket = stack.enter_context(simulated_bucket(self.num_shards, shard_samples=self.shard_samples))
        store, _ = open_store(f"ais://{BUCKET}/{PREFIX}", endpoint=bucket.endpoint)
        manifest = read_manifest(store, PREFIX)
        assert manifest is not None, "the server has it"
        window_bytes = WINDOW_SHARDS * int(manifest.shard_bytes.max())
        return OpenInputs(bucket=bucket, cache=folder.new() / "cache", window_bytes=window_bytes)

    def subjects(self, made: OpenInputs) -> Sequence[Opening]:
        return [Opening(face, ranks) for face in self.faces for ranks in (*self.ranks, 0)]

    def name_of(self, subject: Opening) -> str:
        what = f"{subject.ranks} ranks" if subject.ranks else "listing"
        return f"{what}, {FACES[subject.server]}"

    def measure(self, made: OpenInputs, subject: Opening, number: int) -> Measured:
        before = made.bucket.requests.copy()
        if subject.ranks:
            row = self._open(made, subject)
        else:
            row = call_apart(_list, subject.server, made.bucket.endpoint, name=self.name_of(subject), fresh=True)
        return row | {"requests": dict(made.bucket.requests - before)}

    def _open(self, made: OpenInputs, subject: Opening) -> Measured:
        made.cache.mkdir()
        try:
            with ExitStack() as stack:
                ranks = [
                    stack.enter_context(
                        TurnProcess(
                            _open_rank,
                            subject,
                            number,
                            made._replace(bucket=SimulatedBucket(made.bucket.endpoint, Counter())),
                            name=f"rank {number} of {self.name_of(subject)}",
                            fresh=True,
                        )
                    )
                    for number in range(subject.ranks)
                ]
                for place in ("open", "weigh", "read"):
                    meet(ranks, place)
                    move_on(ranks)
                meet(ranks, DONE)
                found = [rank.result for rank in ranks]
        finally:
            shutil.rmtree(made.cache)
        figures = {name: max(one[name] for one in found) for name in ("open_s", "peak_mib", "read_s")}
        means = {name: fmean(one[name] for one in found) for name in ("open_cpu_s", "opened_mib")}
        return {"figures": figures | means, "imported_mib": found[0]["imported_mib"]}

    def record(self, made: OpenInputs, subject: Opening, rows: Sequence[Measured]) -> dict[str, Any]:
        record = super().record(made, subject, rows)
        record["setting"] = {"server": FACES[subject.server], "ranks": subject.ranks or "listing"}
        return record

    def notes(self, made: OpenInputs, rounds: Rounds[Opening, Measured]) -> list[str]:
        firsts = [(self.name_of(subject), rounds.whole(subject)[0]["requests"]) for subject in rounds.subjects]
        requests = (
            f"{name}: {', '.join(f'{count} {kind}' for kind, count in sorted(found.items()))}" for name, found in firsts
        )
        return [f"Requests: {'; '.join(requests)}.", f"Cache files in {file_system(made.cache.parent)}."]


def _use_server(face: str, endpoint: str) -> str | None:
    """Set the variables with which S3 clients find the server, which takes any keys; return AIStore's endpoint."""
    os.environ |= {
        "AWS_ENDPOINT_URL": f"{endpoint}/s3",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "OMP_NUM_THREADS": "1",
    }
    return endpoint if face == "ais" else None


def _list(face: str, endpoint: str) -> Measured:
    store, _ = open_store(f"{face}://{BUCKET}/{PREFIX}", endpoint=_use_server(face, endpoint))
    started = time.perf_counter()
    num_names = sum(1 for _ in store.list(PREFIX))
    return {"figures": {"list_s": time.perf_counter() - started}, "num_names": num_names}


def _open_rank(meet: Meet, subject: Opening, rank: int, made: OpenInputs) -> dict[str, float]:
    """Open a loader in a new interpreter, and read from it; the main function of a rank's process."""
    endpoint = _use_server(subject.server, made.bucket.endpoint)
    import nvidia.dali.plugin.pytorch  # noqa: F401 (all that a training script has imported)

    import dali_pipes as dp
    import dali_pipes.iterator

    process = psutil.Process()
    imported_mib, imported_pss = _status_mib("VmRSS"), process.memory_full_info().pss
    meet("open")
    started, cpu_s = time.perf_counter(), time.process_time()
    with dp.loader(
        f"{subject.server}://{BUCKET}/{PREFIX}",
        dp.classification_eval(resize=16, crop=16),
        batch_size=64,
        seed=7,
        shuffle=dp.Shuffle(window_bytes=made.window_bytes),
        cache=dp.Cache(directory=made.cache, show_progress=False),
        rank=rank,
        world_size=subject.ranks,
        device="cpu",
        endpoint=endpoint,
    ) as loader:
        found = {"open_s": time.perf_counter() - started, "open_cpu_s": time.process_time() - cpu_s}
        meet("weigh")
        found["opened_mib"] = (process.memory_full_info().pss - imported_pss) / (1 << 20)
        found |= {"peak_mib": _status_mib("VmHWM") - imported_mib, "imported_mib": imported_mib}
        meet("read")
        started = time.perf_counter()
        for _ in itertools.islice(loader, NUM_BATCHES):
            pass
        return {**found, "read_s": time.perf_counter() - started}


def _status_mib(name: str) -> float:
    """A figure of ``/proc/self/status``, such as ``VmHWM``, the peak; of this process alone, in MiB.

    ``getrusage()`` would also count the memory that the parent once had.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
