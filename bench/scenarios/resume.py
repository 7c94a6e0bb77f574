"""Time a resumed loader's first batch against that of an epoch's start: warm, cold, and with other shards held back.

Warm: every shard is resident. In an open loader, `set_epoch` against `load_state_dict` into the middle of the same
epoch; and with the opening of the loader, which is told where to begin by ``state=``. Each turn first waits for what
was decoded ahead, since both would have to wait for it.

Cold: the cache is empty, and the samples are packed anew into more shards than a batch names, on a server in the turn's
process. *Told later*: the loader is opened without a state, has begun to stage its epoch 0, and is then told by
`load_state_dict`. *Held back*: until the first batch was delivered the server answers only for the shards that the
batch's index lines name. A loader that waits for any other shard would wait for ever; after `PATIENCE_S` the server
answers for all, and the record says so.
"""

import itertools
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import unquote

import numpy as np

from bench.engine.scenario import MEMORY, Rounds, Scenario
from bench.loaders.encoded import endpoint_of, shard_urls
from bench.loaders.protocol import Device
from bench.reports.figures import Figure
from bench.reports.tables import format_rows, spread_cell, summarised
from bench.tools.environment import available_cores
from bench.tools.folders import RunFolder
from bench.tools.object_server import upload_shards
from bench.tools.repeat import repeat_shards
from dali_pipes.cache.free_space import file_system
from dali_pipes.errors import DataError
from prep.embedded.server import NodeServer
from prep.embedded.storage import Storage

if TYPE_CHECKING:
    from dali_pipes import Loader
    from dali_pipes.formats.manifest import Manifest
    from dali_pipes.store.shard_set import ShardSet


BUCKET = "dali-pipes-bench-resume"
# What was decoded ahead is done by then, on any machine that decodes two batches in less.
SETTLE_S = 0.5
NUM_DRAWN = 3
"""Batches that an open loader has delivered before its turn is timed."""
PATIENCE_S = 30.0
BAR = 1.2
"""A resumed loader's first batch may take this many times as long as an epoch's first."""
_SECONDS = Figure(title="ms", unit="ms", better="low", digits=0, scale=1000, about="To the first batch.")
FIGURES = {"epoch_start_s": _SECONDS, "resume_s": _SECONDS}

Where = Literal["epoch start", "resume"]
WHERE: tuple[Where, Where] = ("epoch start", "resume")
SITUATIONS = {
    "warm, loader open": "all shards resident; set_epoch() against load_state_dict()",
    "warm, with opening": "all shards resident; from before dp.loader(), the resumed one's with state=",
    "cold, with opening": "empty cache; likewise",
    "cold, told later": "empty cache; load_state_dict() into the loader, which has begun with epoch 0",
    "cold, others held back": "empty cache; the server answers for no shard but those that the first batch names",
}


class Start(NamedTuple):
    """What is timed: in which situation, from which place of an epoch."""

    situation: str
    where: Where


class ResumeTurn(NamedTuple):
    """What one turn measured."""

    first_batch_s: float
    num_held: int = 0
    """Shards that were asked for and held back."""
    was_released: bool = False
    """Whether the batch did not come before the server had answered for others."""


@dataclass(frozen=True, kw_only=True)
class ResumeInputs:
    """Two data sets: the given shards, resident in a cache, and their samples packed anew."""

    warm_urls: Sequence[str]
    warm_endpoint: str | None
    warm_cache: Path
    warm_state: dict[str, Any]
    """In the middle of epoch 0."""
    storage: Path
    """Of the server."""
    cold_cache: Path
    cold: "Manifest"
    cold_window: int
    """The shuffle window, in bytes."""
    cold_state: dict[str, Any]
    named: dict[Where, frozenset[str]]
    """The shards that the first batch names."""

    @property
    def cold_urls(self) -> list[str]:
        """The shards that were packed anew."""
        return [f"ais://{BUCKET}/{name}" for name in self.cold.names]


class HeldBack:
    """Shards for which the server does not answer."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._answered: frozenset[str] = frozenset()
        self.asked: set[str] = set()
        """Those that were asked for while they were held back."""

    @contextmanager
    def all_but(self, answered: frozenset[str]) -> Iterator[None]:
        """Hold all shards back but these."""
        self._answered, self.asked = answered, set()
        self._is_open.clear()
        try:
            yield
        finally:
            self._is_open.set()

    @property
    def is_open(self) -> bool:
        """Whether nothing is held back."""
        return self._is_open.is_set()

    def release(self) -> None:
        """Answer for all, those that were asked for as well."""
        self._is_open.set()

    def wait_for(self, request: BaseHTTPRequestHandler) -> None:
        """Return when the server may answer. Only requests for a shard's bytes wait."""
        folder, _, name = unquote(request.path.partition("?")[0]).rpartition("/")
        is_shard = request.command == "GET" and folder.startswith("/v1/objects/") and name.endswith(".tar")
        if is_shard and not self._is_open.is_set() and name not in self._answered:
            self.asked.add(name)
            self._is_open.wait()


@dataclass(frozen=True, kw_only=True)
class ResumeScenario(Scenario[ResumeInputs, Start, ResumeTurn]):
    """What is loaded, how often."""

    kind = "resume"
    title = "time resumes"
    figures = FIGURES

    shards: "ShardSet | None" = None
    """The data set; of the cold turns only its samples."""
    repeats: int = 9
    batch_size: int = 64
    num_threads: int = field(default_factory=available_cores)
    crop: int = 350
    device: Device = "auto"
    cold_shards: int = 40
    """Shards that the samples are packed into for the cold turns."""
    cold_windows: int = 5
    """Windows that these make."""
    work: Path | None = MEMORY
    """Where cache files, and the server's objects, lie."""
    patience_s: float = PATIENCE_S
    """Before the server answers for shards that it holds back."""

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
        from prep.index import index_shards

        assert self.shards is not None, "the command names them"
        keys = [f"r0/{key}" for key in _keys(self.shards)]  # as `repeat_shards` calls them
        self._check(len(keys))
        copies = folder.new()
        num_shards = min(self.cold_shards, len(keys))
        packed = repeat_shards(self.shards, directory=copies, num_shards=num_shards, option="--cache")
        storage, warm_cache = folder.new(), folder.new()
        with serve(storage, HeldBack()) as endpoint:
            manifest = index_shards(upload_shards(packed, endpoint, BUCKET), show_progress=True)
            window = max(int(manifest.shard_bytes.max()), int(manifest.total_bytes) // self.cold_windows)
            urls = [f"ais://{BUCKET}/{name}" for name in manifest.names]
            named, state = self._named(manifest, urls, keys, endpoint, cache_dir=folder.new(), window_bytes=window)
        shutil.rmtree(copies)
        warm_urls, warm_endpoint = shard_urls(self.shards), endpoint_of(self.shards)
        # Open until the end: its shards stay resident for the loaders of the turns.
        warm = stack.enter_context(self._open(warm_urls, warm_endpoint, cache_dir=warm_cache))
        for (batch,) in warm:
            _touch(batch)
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

    def _check(self, num_samples: int) -> None:
        if num_samples < 3 * self.batch_size:
            assert self.shards is not None
            raise DataError(
                f"'{self.shards.url}' holds {num_samples} samples, which are less than three batches of "
                f"{self.batch_size}; lower --batch-size, or name more shards"
            )

    def _named(
        self, manifest: "Manifest", urls: Sequence[str], keys: Sequence[str], endpoint: str, **options: Any
    ) -> tuple[dict[Where, frozenset[str]], dict[str, Any]]:
        """The shards that the first batches name, and the state of the resume."""
        row_of = {key: row for row, key in enumerate(keys)}
        named: dict[Where, frozenset[str]] = {}
        with self._open(urls, endpoint, **options) as loader:
            state = _state_in(loader, epoch=0)
            for where in WHERE:
                _go_to(loader, where, 0)
                named[where] = named_shards(manifest, [row_of[key] for key in next(loader)[0]["key"]])
        return named, state

    def _open(
        self,
        urls: Sequence[str],
        endpoint: str | None,
        *,
        cache_dir: Path,
        window_bytes: int | Literal["all"] = "all",
        state: dict[str, Any] | None = None,
    ) -> "Loader":
        import dali_pipes as dp

        return dp.loader(
            list(urls),
            dp.segmentation(crop=self.crop),
            batch_size=self.batch_size,
            seed=self.seed,
            device=self.device,
            shuffle=dp.Shuffle(window_bytes=window_bytes),
            cache=dp.Cache(directory=cache_dir, show_progress=False),
            decode=dp.Decode(threads=self.num_threads),
            outputs=dp.Outputs(keys=True),
            state=state,
            endpoint=endpoint,
        )

    def subjects(self, made: ResumeInputs) -> Sequence[Start]:
        """An epoch's start and a resume in each situation."""
        return [Start(*pair) for pair in itertools.product(SITUATIONS, WHERE)]

    def name_of(self, subject: Start) -> str:
        """``resume, cold, told later``."""
        return f"{subject.where}, {subject.situation}"

    def measure(self, made: ResumeInputs, subject: Start, number: int) -> ResumeTurn:
        """Time one first batch."""
        if subject.situation.startswith("cold"):
            return self._measure_cold(made, subject)
        if subject.situation == "warm, loader open":
            with self._open(made.warm_urls, made.warm_endpoint, cache_dir=made.warm_cache) as loader:
                for (batch,) in itertools.islice(loader, NUM_DRAWN):
                    _touch(batch)
                time.sleep(SETTLE_S)
                started = time.perf_counter()
                _go_to(loader, subject.where, 1 + number)
                _touch(next(loader)[0])
                return ResumeTurn(time.perf_counter() - started)
        started = time.perf_counter()
        state = made.warm_state if subject.where == "resume" else None
        with self._open(made.warm_urls, made.warm_endpoint, cache_dir=made.warm_cache, state=state) as loader:
            _touch(next(loader)[0])
            return ResumeTurn(time.perf_counter() - started)

    def _measure_cold(self, made: ResumeInputs, subject: Start) -> ResumeTurn:
        """On an empty cache, which is removed afterwards."""
        state = made.cold_state if subject.where == "resume" else None
        is_held, is_told_later = subject.situation == "cold, others held back", subject.situation == "cold, told later"
        held = HeldBack()
        made.cold_cache.mkdir()
        try:
            with ExitStack() as stack:
                endpoint = stack.enter_context(serve(made.storage, held))
                if is_held:
                    stack.enter_context(held.all_but(made.named[subject.where]))
                    # A limit, whoever is wrong.
                    timer = threading.Timer(self.patience_s, held.release)
                    timer.daemon = True
                    timer.start()
                    stack.callback(timer.cancel)
                started = time.perf_counter()
                with self._open(
                    made.cold_urls,
                    endpoint,
                    cache_dir=made.cold_cache,
                    window_bytes=made.cold_window,
                    state=None if is_told_later else state,
                ) as loader:
                    if is_told_later and state is not None:
                        loader.load_state_dict(state)
                    _touch(next(loader)[0])
                    elapsed_s = time.perf_counter() - started
                    if not is_held:
                        return ResumeTurn(elapsed_s)
                    return ResumeTurn(elapsed_s, num_held=len(held.asked), was_released=held.is_open)
        finally:
            shutil.rmtree(made.cold_cache)

    def report(self, made: ResumeInputs, rounds: Rounds[Start, ResumeTurn]) -> dict[str, Any]:
        """``{"records": [{"scenario", "epoch_start_s", "resume_s", "ratio", "is_within_bar", ...}], ...}``.

        For the last situation also ``waits_for_others``: whether any turn did.
        """
        left_out = {"shards", "work", "timeout_s", "deadline", "patience_s"}
        return {
            "records": [
                _record(name, {where: rounds.whole(Start(name, where)) for where in WHERE}) for name in SITUATIONS
            ],
            "num_samples": made.cold.num_samples,
            "num_shards": len(made.warm_urls),
            "cold_shards": made.cold.num_shards,
            "cold_shuffle_window": made.cold_window,
            "cold_named": {where.replace(" ", "_"): len(named) for where, named in made.named.items()},
            "patience_s": self.patience_s,
            "repeats": self.repeats,
            "cache": file_system(made.warm_cache),
            "options": {one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out},
        }

    @staticmethod
    def table(report: Any) -> str:
        """See `format_resume`."""
        return format_resume(report)


def named_shards(manifest: "Manifest", rows: Sequence[int]) -> frozenset[str]:
    """The shards that hold these samples, by their numbers in the order in which they were packed."""
    ends = np.cumsum(manifest.samples)
    return frozenset(manifest.names[int(shard)] for shard in np.searchsorted(ends, np.asarray(rows), side="right"))


def _middle(num_samples: int, batch_size: int) -> int:
    """A position in mid-epoch, where a batch starts."""
    return num_samples // batch_size // 2 * batch_size


def _state_in(loader: "Loader", *, epoch: int) -> dict[str, Any]:
    """The state in the middle of an epoch."""
    return loader.state_dict() | {"epoch": epoch, "delivered": _middle(loader.num_samples, loader.batch_size)}


def _go_to(loader: "Loader", where: Where, epoch: int) -> None:
    if where == "epoch start":
        loader.set_epoch(epoch)
    else:
        loader.load_state_dict(_state_in(loader, epoch=epoch))


def _touch(batch: dict[str, Any]) -> None:
    # One value of each photo: enough to find a batch that is not there yet.
    batch["image"][:, 0, 0, 0].sum().item()


@contextmanager
def serve(directory: Path, held: HeldBack) -> Iterator[str]:
    """The endpoint of an embedded node in this process, whose shards can be held back."""
    with Storage(directory) as storage, NodeServer(storage, port=0, before_request=held.wait_for) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server.endpoint
        finally:
            held.release()
            server.shutdown()
            thread.join()


def _keys(shards: "ShardSet") -> list[str]:
    """The keys of all samples, in their order."""
    from dali_pipes.formats.tar_reader import ArchiveReader

    keys: list[str] = []
    for name in shards.names:
        with shards.store.open(name) as stream:
            keys += dict.fromkeys(member.key for member in ArchiveReader(stream, shard=shards.store.locate(name)))
    return keys


def _record(situation: str, turns: dict[Where, list[ResumeTurn]]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "scenario": situation,
        **summarised(
            {f"{where.replace(' ', '_')}_s": [turn.first_batch_s for turn in turns[where]] for where in WHERE}
        ),
        "repeats": {where.replace(" ", "_"): [turn._asdict() for turn in turns[where]] for where in WHERE},
    }
    record["ratio"] = record["resume_s"] / record["epoch_start_s"]
    record["is_within_bar"] = record["ratio"] <= BAR
    if situation == "cold, others held back":
        record["waits_for_others"] = any(turn.was_released for turn in turns["resume"])
        record["num_held_back"] = [turn.num_held for turn in turns["resume"]]
    return record


def format_resume(report: dict[str, Any]) -> str:
    """A row a situation, and below what the figures are of."""
    rows = [["first batch", "epoch's start ms", "resume in mid-epoch ms", "ratio"]]
    rows += [
        [record["scenario"], *(spread_cell(record, name, FIGURES) for name in FIGURES), f"{record['ratio']:.2f}"]
        for record in report["records"]
    ]
    last = report["records"][-1]
    named, others = report["cold_named"]["resume"], max(last["num_held_back"])
    verdict = (
        f"did not come within {report.get('patience_s', PATIENCE_S):g} s: IT WAITS FOR OTHERS"
        if last["waits_for_others"]
        else "came each time: it waits for no other"
    )
    return "\n".join(
        [
            format_rows(rows),
            "",
            f"{report['num_samples']:,} samples in {report['num_shards']} shards, batch "
            f"{report['options']['batch_size']}; median of {report['repeats']} turns (smallest to largest).",
            f"Cold: in {report['cold_shards']} shards, of which the resumed batch names {named}; with up to {others} "
            f"others asked for and held back it {verdict}.",
        ]
    )
