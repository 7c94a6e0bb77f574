"""Time the first batch of a resumed loader and of an epoch's start: warm, cold, and with other shards held back.

Warm: every shard is resident. One situation times `set_epoch` against `load_state_dict` into the middle of the same
epoch, in an open loader. The other includes the opening of the loader, which takes its position from ``state=``. Each
turn of an open loader first waits until the batches decoded ahead are done, since both cases would have to wait for
them.

Cold: the cache is empty, and the samples are packed anew into more shards than a batch names, on a server in the turn's
process. *Told later*: the loader is opened without a state, begins to stage its epoch 0, and then gets its position
from `load_state_dict`. *Others held back*: until the first batch is delivered, the server answers only for the shards
that the batch's index lines name. A loader that waits for any other shard would wait for ever. So the server answers
for all shards after `PATIENCE_S`, and the record says that it did.
"""

import itertools
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import unquote

import numpy as np

from bench.engine.options import cache_option, option
from bench.engine.scenario import Measured, Rounds
from bench.loaders.encoded import shard_urls
from bench.scenarios.on_shards import FORMS, ShardsScenario, touch, upload_repeated
from bench.tools.buckets import served
from bench.tools.folders import RunFolder
from dali_pipes.cache.free_space import file_system
from dali_pipes.errors import DataError
from prep.embedded.connection import NodeConnection
from prep.embedded.storage import Storage

if TYPE_CHECKING:
    from dali_pipes import Loader
    from dali_pipes.formats.manifest import Manifest
    from dali_pipes.store.shard_set import ShardSet


BUCKET = "dali-pipes-bench-resume"
# Any machine that decodes two batches in this time has then finished the batches that were decoded ahead.
SETTLE_S = 0.5
NUM_DRAWN = 3
"""Batches that an open loader has delivered before its turn is timed."""
PATIENCE_S = 30.0
Where = Literal["epoch start", "resume"]
WHERE: tuple[Where, Where] = ("epoch start", "resume")
SITUATIONS = {
    "warm, loader open": "all shards resident; set_epoch() against load_state_dict()",
    "warm, with opening": "all shards resident; dp.loader() is timed too, with state= for the resume",
    "cold, with opening": "empty cache; dp.loader() is timed too, with state= for the resume",
    "cold, told later": "empty cache; load_state_dict() after the loader has begun with epoch 0",
    "cold, others held back": "empty cache; the server answers only for the shards that the first batch names",
}


LAST = "cold, others held back"


class Start(NamedTuple):
    """A situation, and the place in an epoch where the loader begins."""

    situation: str
    loader: Where


@dataclass(frozen=True, kw_only=True)
class ResumeInputs:
    """Two data sets: the given shards, resident in a cache, and their samples packed anew."""

    warm_urls: Sequence[str]
    warm_endpoint: str | None
    warm_cache: Path
    warm_state: dict[str, Any]
    """The state in the middle of epoch 0."""
    storage: Path
    """The directory of the server."""
    cold_cache: Path
    cold: "Manifest"
    cold_window: int
    """The shuffle window, in bytes."""
    cold_state: dict[str, Any]
    named: dict[Where, frozenset[str]]
    """The shards that the first batch names."""

    @property
    def cold_urls(self) -> list[str]:
        return [f"ais://{BUCKET}/{name}" for name in self.cold.names]


class HeldBack:
    """Shards for which the server does not answer for now."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._answered: frozenset[str] = frozenset()
        self.asked: set[str] = set()
        """Names of the held-back shards that the loader asked for."""

    @contextmanager
    def all_but(self, answered: frozenset[str]) -> Iterator[None]:
        """Hold back all shards except these."""
        self._answered, self.asked = answered, set()
        self._is_open.clear()
        try:
            yield
        finally:
            self._is_open.set()

    @property
    def is_open(self) -> bool:
        """Whether no shard is held back."""
        return self._is_open.is_set()

    def release(self) -> None:
        """Answer for all shards, also for those that wait."""
        self._is_open.set()

    def wait_for(self, request: NodeConnection) -> None:
        """Return when the server may answer. Only requests for a shard's bytes wait."""
        folder, _, name = unquote(request.path.partition("?")[0]).rpartition("/")
        is_shard = request.command == "GET" and folder.startswith("/v1/objects/") and name.endswith(".tar")
        if is_shard and not self._is_open.is_set() and name not in self._answered:
            self.asked.add(name)
            self._is_open.wait()


@dataclass(frozen=True, kw_only=True)
class ResumeScenario(ShardsScenario[ResumeInputs, Start, Measured]):
    """Time the first batch after a resume in mid-epoch, and at the start of an epoch, warm and cold.

    Reads --shards. The cold turns load a copy of them from a server of our own. In one scenario it answers only for the
    shards that the first batch names. Writes nothing but the file that --json names.
    """

    kind = "resume"
    title = "time resumes"
    ratio_to = "epoch start"

    shards: "ShardSet | None" = option(required=True, help=f"What to load: {FORMS}")
    repeats: int = option(9, help="Turns of each scenario.")
    cold_shards: int = option(40, help="Shards that the samples are packed into for the cold turns.")
    cold_windows: int = option(5, help="Shuffle windows of these shards.")
    work: Path | None = cache_option("Where cache files lie; the server of the cold turns keeps the samples there too.")
    patience_s: float = PATIENCE_S
    """The server answers for the held-back shards after this time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cold_windows > self.cold_shards:
            raise ValueError(
                f"cold_windows must not be more than cold_shards={self.cold_shards}, got {self.cold_windows}"
            )

    def prepare(self, folder: RunFolder, stack: ExitStack) -> ResumeInputs:
        """Stage the given shards, pack their samples anew, and learn which shards the first batches name.

        Raises:
            CacheError: If the shards do not fit ``work``.
            DataError: If an epoch has less than three batches: it has no middle to resume at.
        """
        assert self.shards is not None, "the command names them"
        keys = [f"r0/{key}" for key in _keys(self.shards)]  # as `repeat_shards` calls them
        if len(keys) < 3 * self.batch_size:
            raise DataError(
                f"'{self.shards.url}' holds {len(keys)} samples, which are less than three batches of "
                f"{self.batch_size}; lower --batch-size, or name more shards"
            )
        storage, warm_cache = folder.new(), folder.new()
        with serve(storage, HeldBack()) as endpoint:
            num_shards = min(self.cold_shards, len(keys))
            manifest = upload_repeated(self.shards, endpoint, BUCKET, folder=folder, num_shards=num_shards)
            window = max(int(manifest.shard_bytes.max()), int(manifest.total_bytes) // self.cold_windows)
            urls = [f"ais://{BUCKET}/{name}" for name in manifest.names]
            with self.open_loader(urls, endpoint, cache_dir=folder.new(), window_bytes=window) as loader:
                state = _state_in(loader, epoch=0)
                named = {where: _named(loader, where, manifest, keys) for where in WHERE}
        warm_urls, warm_endpoint = shard_urls(self.shards), self.shards.store.endpoint
        # Open until the end: its shards stay resident for the loaders of the turns.
        warm = stack.enter_context(self.open_loader(warm_urls, warm_endpoint, cache_dir=warm_cache, window_bytes="all"))
        for (batch,) in warm:
            touch(batch)
        return ResumeInputs(
            warm_urls=warm_urls,
            warm_endpoint=warm_endpoint,
            warm_cache=warm_cache,
            warm_state=_state_in(warm, epoch=0),
            storage=storage,
            cold_cache=folder.new() / "cache",
            cold=manifest,
            cold_window=window,
            cold_state=state,
            named=named,
        )

    def subjects(self, made: ResumeInputs) -> Sequence[Start]:
        """An epoch's start and a resume in each situation."""
        return [Start(*pair) for pair in itertools.product(SITUATIONS, WHERE)]

    def name_of(self, subject: Start) -> str:
        return f"{subject.loader}, {subject.situation}"

    def measure(self, made: ResumeInputs, subject: Start, number: int) -> Measured:
        if subject.situation.startswith("cold"):
            return self._measure_cold(made, subject)
        is_open = subject.situation == "warm, loader open"
        state = made.warm_state if subject.loader == "resume" and not is_open else None
        started = time.perf_counter()
        with self.open_loader(
            made.warm_urls, made.warm_endpoint, cache_dir=made.warm_cache, window_bytes="all", state=state
        ) as loader:
            if is_open:
                for (batch,) in itertools.islice(loader, NUM_DRAWN):
                    touch(batch)
                time.sleep(SETTLE_S)
                started = time.perf_counter()
                _go_to(loader, subject.loader, 1 + number)
            touch(next(loader)[0])
            return {"figures": {"first_batch_s": time.perf_counter() - started}}

    def _measure_cold(self, made: ResumeInputs, subject: Start) -> Measured:
        """Time a first batch on an empty cache, which is removed afterwards."""
        state = made.cold_state if subject.loader == "resume" else None
        is_held, is_told_later = subject.situation == LAST, subject.situation == "cold, told later"
        held = HeldBack()
        made.cold_cache.mkdir()
        try:
            with ExitStack() as stack:
                endpoint = stack.enter_context(serve(made.storage, held))
                if is_held:
                    stack.enter_context(held.all_but(made.named[subject.loader]))
                    timer = threading.Timer(self.patience_s, held.release)
                    timer.daemon = True
                    timer.start()
                    stack.callback(timer.cancel)
                started = time.perf_counter()
                with self.open_loader(
                    made.cold_urls,
                    endpoint,
                    cache_dir=made.cold_cache,
                    window_bytes=made.cold_window,
                    state=None if is_told_later else state,
                ) as loader:
                    if is_told_later and state is not None:
                        loader.load_state_dict(state)
                    touch(next(loader)[0])
                    elapsed_s = time.perf_counter() - started
                    figures = {"first_batch_s": elapsed_s}
                    if not is_held:
                        return {"figures": figures}
                    return {"figures": {**figures, "num_held": len(held.asked)}, "was_released": held.is_open}
        finally:
            shutil.rmtree(made.cold_cache)

    def data(self, made: ResumeInputs) -> list[dict[str, Any]]:
        return [{"num_samples": made.cold.num_samples, "num_shards": len(made.warm_urls)}]

    def notes(self, made: ResumeInputs, rounds: Rounds[Start, Measured]) -> list[str]:
        """Say whether a resumed loader waited for other shards than those that its batch names."""
        turns = rounds.whole(Start(LAST, "resume"))
        verdict = (
            f"did not come within {self.patience_s:g} s: IT WAITS FOR OTHERS"
            if any(turn["was_released"] for turn in turns)
            else "came each time: it waits for no other"
        )
        return [
            f"Cold: in {made.cold.num_shards} shards, of which the resumed batch names {len(made.named['resume'])}; "
            f"with others asked for and held back it {verdict}.",
            f"Cache files in {file_system(made.warm_cache)}.",
        ]


def named_shards(manifest: "Manifest", rows: Sequence[int]) -> frozenset[str]:
    """The shards that hold the samples with these ordinals."""
    ends = np.cumsum(manifest.samples)
    return frozenset(manifest.names[int(shard)] for shard in np.searchsorted(ends, np.asarray(rows), side="right"))


def _named(loader: "Loader", where: Where, manifest: "Manifest", keys: Sequence[str]) -> frozenset[str]:
    """The shards that the first batch names; ``keys`` are those of all samples, in the order of the manifest."""
    _go_to(loader, where, 0)
    row_of = {key: row for row, key in enumerate(keys)}
    return named_shards(manifest, [row_of[key] for key in next(loader)[0]["key"]])


def _state_in(loader: "Loader", *, epoch: int) -> dict[str, Any]:
    """The state at the batch in the middle of an epoch."""
    middle = loader.num_samples // loader.batch_size // 2 * loader.batch_size
    return loader.state_dict() | {"epoch": epoch, "delivered": middle}


def _go_to(loader: "Loader", where: Where, epoch: int) -> None:
    if where == "epoch start":
        loader.set_epoch(epoch)
    else:
        loader.load_state_dict(_state_in(loader, epoch=epoch))


@contextmanager
def serve(directory: Path, held: HeldBack) -> Iterator[str]:
    """Run an embedded node in this process that can hold shards back; yields its endpoint."""
    with served(Storage(directory), before_request=held.wait_for) as endpoint:
        try:
            yield endpoint
        finally:
            held.release()


def _keys(shards: "ShardSet") -> list[str]:
    """The keys of all samples, in the order of the shards."""
    from dali_pipes.formats.tar_reader import ArchiveReader

    keys: list[str] = []
    for name in shards.names:
        with shards.store.open(name) as stream:
            keys += dict.fromkeys(member.key for member in ArchiveReader(stream, shard=shards.store.locate(name)))
    return keys
