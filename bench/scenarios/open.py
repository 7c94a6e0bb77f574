"""Open loaders of a bucket of up to a million shards, as one rank and as many ranks of a machine, and read from them.

The bucket is simulated (`bench.tools.simulated_bucket`) and answers as AIStore and as S3 do. Each turn starts new
interpreters, one for each rank, that import everything first; then all of them open a loader at the same time. When the
last one is open, their memory is measured; then each reads some batches in shuffled order. The server counts the
requests: a loader must not list the bucket.

One more turn for each face lists the whole bucket, as `prep index` does.
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal, NamedTuple

from bench.engine.options import Listed, cache_option, option
from bench.engine.scenario import Rounds, Scenario
from bench.reports.figures import Figure
from bench.reports.tables import records_table, spread_cell, summarised
from bench.tools.folders import RunFolder
from bench.tools.opening_rank import STEPS
from bench.tools.simulated_bucket import BUCKET, PAGE_LATENCY_S, PREFIX, SimulatedBucket
from dali_pipes.cache.free_space import file_system
from dali_pipes.errors import PipesError
from dali_pipes.processes.programs import own_program

NUM_BATCHES = 200
WINDOW_SHARDS = 10
FACES = {"ais": "AIStore", "s3": "S3"}
FIGURES = {
    "open_s": Figure(
        title="open s", unit="s", better="low", digits=2, about="Until dp.loader() returns; slowest rank."
    ),
    "open_cpu_s": Figure(title="CPU s", unit="s", better="low", digits=2, about="Of a rank's opening; mean of ranks."),
    "opened_mib": Figure(
        title="opened MiB", unit="MiB", better="low", digits=0, about="A rank's PSS, less its imports."
    ),
    "peak_mib": Figure(title="peak MiB", unit="MiB", better="low", digits=0, about="A rank's peak RSS, less imports."),
    "read_s": Figure(title="read s", unit="s", better="low", digits=2, about="For the batches after the opening."),
    "list_s": Figure(title="list s", unit="s", better="low", digits=1, about="To list every name of the bucket."),
}


class Turn(NamedTuple):
    """What is measured together: loaders of so many ranks, or, with none, a listing."""

    face: str
    ranks: int


@dataclass(frozen=True, kw_only=True)
class OpenInputs:
    """The running server."""

    endpoint: str
    bucket: SimulatedBucket
    cache: Path
    window_bytes: int


@dataclass(frozen=True, kw_only=True)
class OpenScenario(Scenario[OpenInputs, Turn, dict[str, Any]]):
    """Open loaders of a simulated bucket of a million shards, list it, and read batches from it.

    Reads nothing but what a server of its own makes up. Writes nothing but the file that --json names.
    """

    kind = "open"
    title = "open"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"
    figures = FIGURES

    num_shards: int = option(1_000_000, help="Shards of the bucket.")
    shard_samples: int = option(1000, help="Samples of each shard.")
    ranks: Sequence[int] = option("1,8", type=Listed(int), help="Numbers of ranks that open a loader at once.")
    faces: Sequence[str] = option("ais,s3", type=Listed(str), help="Whose answers the server gives: ais, s3.")
    repeats: int = option(3, help="Turns of each.")
    work: Path | None = cache_option("Where the cache files lie.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := set(self.faces) - FACES.keys():
            raise ValueError(f"faces must be of {', '.join(FACES)}, got '{min(unknown)}'")
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"ranks must be positive numbers, got {','.join(map(str, self.ranks)) or 'none'}")

    def prepare(self, folder: RunFolder, stack: ExitStack) -> OpenInputs:
        """Start the server; it makes the manifest, which takes ten seconds for a million shards."""
        bucket = stack.enter_context(
            contextlib.closing(SimulatedBucket(self.num_shards, shard_samples=self.shard_samples))
        )
        from dali_pipes.data_set.indexing import read_manifest
        from dali_pipes.store.urls import open_store

        store, _ = open_store(f"ais://{BUCKET}/{PREFIX}", endpoint=bucket.endpoint)
        manifest = read_manifest(store, PREFIX)
        assert manifest is not None, "the server has it"
        window_bytes = WINDOW_SHARDS * int(manifest.shard_bytes.max())
        return OpenInputs(
            endpoint=bucket.endpoint, bucket=bucket, cache=folder.new() / "cache", window_bytes=window_bytes
        )

    def subjects(self, made: OpenInputs) -> Sequence[Turn]:
        return [Turn(face, ranks) for face in self.faces for ranks in (*self.ranks, 0)]

    def name_of(self, subject: Turn) -> str:
        what = f"{subject.ranks} ranks" if subject.ranks else "listing"
        return f"{what}, {FACES[subject.face]}"

    def measure(self, made: OpenInputs, subject: Turn, number: int) -> dict[str, Any]:
        before = made.bucket.counts()
        with _environment(made.endpoint):
            row = self._open(made, subject) if subject.ranks else _list(made, subject.face)
        return row | {"requests": dict(made.bucket.counts() - before)}

    def _open(self, made: OpenInputs, subject: Turn) -> dict[str, Any]:
        made.cache.mkdir()
        try:
            with ExitStack() as stack:
                ranks = [stack.enter_context(_Rank()) for _ in range(subject.ranks)]
                for number, rank in enumerate(ranks):
                    rank.tell(
                        json.dumps(
                            {
                                "url": f"{subject.face}://{BUCKET}/{PREFIX}",
                                "endpoint": made.endpoint if subject.face == "ais" else None,
                                "window_bytes": made.window_bytes,
                                "cache": str(made.cache),
                                "rank": number,
                                "world_size": subject.ranks,
                                "num_batches": NUM_BATCHES,
                            }
                        )
                    )
                done = {}
                for step in STEPS:
                    for rank in ranks:
                        rank.tell(step)
                    done[step] = [rank.answer() for rank in ranks]
        finally:
            shutil.rmtree(made.cache)
        imported, opened, weighed, read = (done[step] for step in STEPS)
        mean = len(opened)
        return {
            "open_s": max(each["s"] for each in opened),
            "open_cpu_s": sum(each["cpu_s"] for each in opened) / mean,
            "opened_mib": sum(now["pss_mib"] - then["pss_mib"] for now, then in zip(weighed, imported, strict=True))
            / mean,
            "peak_mib": max(now["peak_rss_mib"] - then["rss_mib"] for now, then in zip(weighed, imported, strict=True)),
            "imported_mib": median(each["rss_mib"] for each in imported),
            "read_s": max(each["s"] for each in read),
        }

    def report(self, made: OpenInputs, rounds: Rounds[Turn, dict[str, Any]]) -> dict[str, Any]:
        """``{"records": [{"face", "ranks", "open_s", ..., "requests", "repeats"}], ...}``; a listing has no ranks.

        ``requests`` are those of the first round, by kind.
        """
        return {
            "records": [
                {
                    **subject._asdict(),
                    **summarised({name: [row[name] for row in rows] for name in FIGURES if rows and name in rows[0]}),
                    "requests": rows[0]["requests"] if rows else {},
                    "repeats": rows,
                }
                for subject in rounds.subjects
                for rows in [rounds.whole(subject)]
            ],
            "num_shards": self.num_shards,
            "shard_samples": self.shard_samples,
            "num_batches": NUM_BATCHES,
            "page_latency_s": PAGE_LATENCY_S,
            "repeats": self.repeats,
            "cache": file_system(made.cache.parent),
        }

    @staticmethod
    def table(report: Any) -> str:
        """One row for each turn, and its requests."""
        columns: dict[str, Any] = {
            "server": lambda one: FACES[one["face"]],
            "ranks": lambda one: str(one["ranks"]) if one["ranks"] else "listing",
        }
        for name, figure in FIGURES.items():
            columns[figure.title] = lambda one, name=name: spread_cell(one, name, FIGURES) if name in one else "-"
        columns["requests"] = lambda one: ", ".join(
            f"{count} {kind}" for kind, count in sorted(one["requests"].items())
        )
        return records_table(report["records"], columns, FIGURES)


class _Rank:
    """A process of `bench.tools.opening_rank`."""

    def __enter__(self) -> "_Rank":
        self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and arguments)
            own_program("bench.tools.opening_rank"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says so
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PipesError(f"a rank ended with exit code {self._process.wait()}; its message is above")
        answer: dict[str, float] = json.loads(line)
        return answer


def _list(made: OpenInputs, face: str) -> dict[str, Any]:
    from dali_pipes.store.urls import open_store

    store, _ = open_store(f"{face}://{BUCKET}/{PREFIX}", endpoint=made.endpoint if face == "ais" else None)
    started = time.perf_counter()
    num_names = sum(1 for _ in store.list(PREFIX))
    return {"list_s": time.perf_counter() - started, "num_names": num_names}


@contextlib.contextmanager
def _environment(endpoint: str) -> Iterator[None]:
    """The variables with which S3 clients find the server; it takes any keys."""
    given = {
        "AWS_ENDPOINT_URL": f"{endpoint}/s3",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
