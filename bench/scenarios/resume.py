"""Time the first batch of a resumed loader and of an epoch's start: warm and cold.

Warm: every shard is resident. One situation times `set_epoch` against `load_state_dict` into the middle of the same
epoch, in an open loader, after the batches decoded ahead are done. The other includes the opening of the loader, which
takes its position from ``state=``. Cold: the cache is empty, and the samples are packed anew into more shards than a
batch names, on a server of our own. *Told later*: the loader begins to stage its epoch 0, and then gets its position
from `load_state_dict`.
"""

import itertools
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bench.engine.options import FORMS, cache_option, option
from bench.engine.scenario import Measured, Rounds
from bench.loaders.encoded import shard_urls
from bench.scenarios.on_shards import ShardsScenario, touch, upload_repeated
from bench.tools.folders import RunFolder
from dali_pipes.cache.placement import file_system
from dali_pipes.errors import DataError
from dali_pipes.store.cluster import embedded_node

if TYPE_CHECKING:
    from dali_pipes import Loader
    from dali_pipes.store.shard_set import ShardSet


BUCKET = "dali-pipes-bench-resume"
# Any machine that decodes two batches in this time has then finished the batches that were decoded ahead.
SETTLE_S = 0.5
NUM_DRAWN = 3
"""Batches that an open loader has delivered before its turn is timed."""
SITUATIONS = ("warm, loader open", "warm, with opening", "cold, with opening", "cold, told later")


class Start(NamedTuple):
    situation: str
    loader: Literal["epoch start", "resume"]


class DataPlace(NamedTuple):
    """Where a loader reads, and its state in the middle of epoch 0."""

    urls: Sequence[str]
    endpoint: str | None
    cache_dir: Path
    window_bytes: int | Literal["all"]
    state: dict[str, Any]


class ResumeInputs(NamedTuple):
    """Two data sets: the given shards, resident in a cache, and their samples packed anew."""

    warm: DataPlace
    cold: DataPlace
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class ResumeScenario(ShardsScenario[ResumeInputs, Start, Measured]):
    """Time the first batch after a resume in mid-epoch, and at the start of an epoch, warm and cold.

    Reads --shards. The cold turns load a copy of them from a server of our own. Writes nothing but the file that --json
    names.
    """

    kind = "resume"
    title = "time resumes"
    ratio_to = "epoch start"

    shards: "ShardSet | None" = option(required=True, help=f"What to load: {FORMS}")
    repeats: int = option(9, help="Turns of each scenario.")
    cold_shards: int = option(40, help="Shards that the samples are packed into for the cold turns.")
    cold_windows: int = option(5, help="Shuffle windows of these shards.")
    work: Path | None = cache_option("Where cache files lie; the server of the cold turns keeps the samples there too.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cold_windows > self.cold_shards:
            raise ValueError(
                f"cold_windows must not be more than cold_shards={self.cold_shards}, got {self.cold_windows}"
            )

    def prepare(self, folder: RunFolder, stack: ExitStack) -> ResumeInputs:
        assert self.shards is not None, "the command names them"
        warm = DataPlace(shard_urls(self.shards), self.shards.store.endpoint, folder.new(), "all", {})
        # Open until the end: its shards stay resident for the loaders of the turns.
        loader = stack.enter_context(self._open(warm))
        if loader.num_samples < 3 * self.batch_size:
            raise DataError(
                f"'{self.shards.url}' holds {loader.num_samples} samples, which are less than three batches of "
                f"{self.batch_size}; lower --batch-size, or name more shards"
            )
        for (batch,) in loader:
            touch(batch)
        endpoint = stack.enter_context(embedded_node.start(folder.new())).endpoint
        num_shards = min(self.cold_shards, loader.num_samples)
        manifest = upload_repeated(self.shards, endpoint, BUCKET, folder=folder, num_shards=num_shards)
        window = max(int(manifest.shard_bytes.max()), int(manifest.total_bytes) // self.cold_windows)
        urls = [f"ais://{BUCKET}/{name}" for name in manifest.names]
        cold = DataPlace(urls, endpoint, folder.new() / "cache", window, {})
        with self._open(cold._replace(cache_dir=folder.new())) as cold_loader:
            cold = cold._replace(state=_state_in(cold_loader, epoch=0))
        return ResumeInputs(warm._replace(state=_state_in(loader, epoch=0)), cold, manifest.num_samples)

    def _open(self, data: DataPlace, state: dict[str, Any] | None = None) -> "Loader":
        return self.open_loader(
            data.urls, data.endpoint, cache_dir=data.cache_dir, window_bytes=data.window_bytes, state=state
        )

    def subjects(self, made: ResumeInputs) -> Sequence[Start]:
        return [start for name in SITUATIONS for start in (Start(name, "epoch start"), Start(name, "resume"))]

    def name_of(self, subject: Start) -> str:
        return f"{subject.loader}, {subject.situation}"

    def measure(self, made: ResumeInputs, subject: Start, number: int) -> Measured:
        """Time one first batch; the cache of a cold turn is removed afterwards."""
        is_cold, is_open = subject.situation.startswith("cold"), subject.situation == "warm, loader open"
        data = made.cold if is_cold else made.warm
        state = data.state if subject.loader == "resume" else None
        is_told_later = is_open or subject.situation == "cold, told later"
        if is_cold:
            data.cache_dir.mkdir()
        started = time.perf_counter()
        try:
            with self._open(data, None if is_told_later else state) as loader:
                if is_open:
                    for (batch,) in itertools.islice(loader, NUM_DRAWN):
                        touch(batch)
                    time.sleep(SETTLE_S)
                    started = time.perf_counter()
                    if state is None:
                        loader.set_epoch(1 + number)
                    else:
                        loader.load_state_dict(_state_in(loader, epoch=1 + number))
                elif is_told_later and state is not None:
                    loader.load_state_dict(state)
                touch(next(loader)[0])
                return {"figures": {"first_batch_s": time.perf_counter() - started}}
        finally:
            if is_cold:
                shutil.rmtree(data.cache_dir)

    def data(self, made: ResumeInputs) -> list[dict[str, Any]]:
        return [{"num_samples": made.num_samples, "num_shards": len(made.warm.urls)}]

    def notes(self, made: ResumeInputs, rounds: Rounds[Start, Measured]) -> list[str]:
        return [
            f"Cold: the samples in {len(made.cold.urls)} shards, from a server on this machine.",
            f"Cache files in {file_system(made.warm.cache_dir)}.",
        ]


def _state_in(loader: "Loader", *, epoch: int) -> dict[str, Any]:
    """The state at the batch in the middle of an epoch."""
    middle = loader.num_samples // loader.batch_size // 2 * loader.batch_size
    return loader.state_dict() | {"epoch": epoch, "delivered": middle}
