"""Time a resumed loader's first batch against that of an epoch's start: warm, cold, with all other shards held back.

Warm: every shard is resident. In a loader that is open, `set_epoch` against `load_state_dict` into the middle of the
same epoch, in turns; and with the opening of the loader, which is told where to begin by ``state=``. What was decoded
ahead is let end before each turn, since both would have to wait for it.

Cold: the cache is empty, and the samples are packed anew into more shards than a batch names, on a server of this
process. *Told later*: the loader is opened without a state, has begun to stage its epoch 0, and is then told by
`load_state_dict`. *Held back*: until the first batch was delivered that server answers only for the shards that the
batch's index lines name. A loader that waited for any other would wait for ever; `PATIENCE_S` later that is said, and
the server opened.
"""

import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from urllib.parse import unquote

import numpy as np

from bench.loaders import Device, available_cores
from bench.reports.report import Spread
from bench.reports.tables import format_rows
from bench.scenarios.windows import MAX_SHARD_BYTES
from dali_pipes.cache.free_space import file_system
from dali_pipes.errors import DataError
from dali_pipes.progress import bar
from prep.embedded.server import NodeServer
from prep.embedded.storage import Storage

if TYPE_CHECKING:
    from dali_pipes import Loader
    from dali_pipes.formats.manifest import Manifest
    from dali_pipes.store.urls import ShardSet
    from prep.sources.record import Source

__all__ = ["HeldBack", "ResumeOptions", "format_resume", "named_shards", "run_resume"]

BUCKET = "dali-pipes-bench-resume"
PREFIX = "resume-"
# What was decoded ahead is done by then, on any machine that decodes two batches in less.
SETTLE_S = 0.5
PATIENCE_S = 30.0
BAR = 1.2
"""A resumed loader's first batch may take this many times as long as an epoch's first."""

Where = Literal["epoch start", "resume"]
WHERE: tuple[Where, Where] = ("epoch start", "resume")
SCENARIOS = {
    "warm, loader open": "all shards resident; set_epoch() against load_state_dict()",
    "warm, with opening": "all shards resident; from before dp.loader(), the resumed one's with state=",
    "cold, with opening": "empty cache; likewise",
    "cold, told later": "empty cache; load_state_dict() into the loader, which has begun with epoch 0",
    "cold, others held back": "empty cache; the server answers for no shard but those that the first batch names",
}


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """What is loaded, how often."""

    repeats: int = 9
    batch_size: int = 64
    num_threads: int = field(default_factory=available_cores)
    crop: int = 350
    seed: int = 7
    device: Device = "auto"
    cold_shards: int = 40
    """Shards that the samples are packed into for the cold turns; fewer where the samples do not divide."""
    cold_windows: int = 5
    """Windows that these make."""
    cache: Path = Path("/dev/shm")  # noqa: S108 (a directory of our own is made there)
    """Where images, and the server's objects, lie."""

    def __post_init__(self) -> None:
        for name in ("repeats", "batch_size", "num_threads", "crop", "cold_shards", "cold_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.cold_windows > self.cold_shards:
            raise ValueError(
                f"cold_windows must not be more than cold_shards={self.cold_shards}, got {self.cold_windows}"
            )
        if not self.cache.is_dir():
            raise ValueError(f"--cache '{self.cache}': no such directory; name one with room for the data set twice")


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

    def wait(self, name: str) -> None:
        """Return when the shard may be answered for."""
        if not self._is_open.is_set() and name not in self._answered:
            self.asked.add(name)
            self._is_open.wait()


class _Turn(NamedTuple):
    first_batch_s: float
    num_held: int = 0
    """Shards that were asked for and held back."""
    was_released: bool = False
    """Whether the batch did not come before the server had answered for others."""


@dataclass(frozen=True, kw_only=True)
class _Cold:
    """The samples packed anew, on the server."""

    manifest: "Manifest"
    endpoint: str
    held: HeldBack
    shuffle_window: int
    named: dict[Where, frozenset[str]]
    """The shards that the first batch names."""
    state: dict[str, Any]
    """Of the resume."""

    @property
    def urls(self) -> list[str]:
        return [f"ais://{BUCKET}/{name}" for name in self.manifest.names]


def run_resume(options: ResumeOptions, shards: "ShardSet") -> dict[str, Any]:
    """Take ``repeats`` turns of each scenario, an epoch's start and a resume one after the other.

    Args:
        options: What to do.
        shards: The data set; of the cold turns only its samples.

    Returns:
        ``{"records": [{"scenario", "epoch_start_s", "resume_s", "ratio", "is_within_bar", "spread", "repeats",
        ...}], ...}``, for JSON; figures are medians. For the last scenario also ``waits_for_others``: whether any turn
        did.

    Raises:
        DataError: If an epoch has less than three batches, in the midst of which there is nothing to resume at.
        CacheError: If the shards do not fit ``options.cache``.
    """
    from bench.environment import describe_environment

    turns: dict[str, dict[Where, list[_Turn]]] = {name: {where: [] for where in WHERE} for name in SCENARIOS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{BUCKET}-", dir=options.cache)))
        held = HeldBack()
        cold = _pack(shards, stack.enter_context(_serve(folder / "server", held)), held, folder, options)
        (folder / "warm").mkdir()
        urls = [shards.store.locate(name) for name in shards.names]
        endpoint = getattr(shards.store, "endpoint", None)

        def open_warm(state: dict[str, Any] | None = None) -> "Loader":
            return _open(options, urls, endpoint, cache_dir=folder / "warm", state=state)

        num_turns = len(SCENARIOS) * len(WHERE) * options.repeats
        with open_warm() as loader, bar(what="time resumes", total=num_turns, unit="turn") as drawn:
            for (batch,) in loader:
                _touch(batch)
            state = _state_in(loader, epoch=0)
            for repeat in range(options.repeats):
                for scenario, where in itertools.product(SCENARIOS, _alternated(repeat)):
                    # What was decoded ahead ends meanwhile, and what was closed.
                    time.sleep(SETTLE_S)
                    if scenario == "warm, loader open":
                        turn = _take_open(loader, where, epoch=1 + repeat)
                    elif scenario == "warm, with opening":
                        turn = _take_opening(open_warm, where, state)
                    else:
                        turn = _take_cold(options, cold, where, folder / "cold", scenario)
                    turns[scenario][where].append(turn)
                    drawn.update(1)
    return {
        "records": [_record(scenario, results) for scenario, results in turns.items()],
        "num_samples": cold.manifest.num_samples,
        "num_shards": len(shards.names),
        "cold_shards": cold.manifest.num_shards,
        "cold_shuffle_window": cold.shuffle_window,
        "cold_named": {where.replace(" ", "_"): len(named) for where, named in cold.named.items()},
        "repeats": options.repeats,
        "cache": file_system(options.cache),
        "options": {name: value for name, value in asdict(options).items() if name != "cache"},
        "environment": describe_environment(),
    }


def named_shards(manifest: "Manifest", rows: Sequence[int]) -> frozenset[str]:
    """The shards that hold these samples, by their numbers in the order in which they were packed."""
    ends = np.cumsum(manifest.samples)
    return frozenset(manifest.names[int(shard)] for shard in np.searchsorted(ends, np.asarray(rows), side="right"))


def _alternated(repeat: int) -> tuple[Where, Where]:
    """Which goes first takes turns, too."""
    return WHERE if repeat % 2 == 0 else (WHERE[1], WHERE[0])


def _middle(num_samples: int, batch_size: int) -> int:
    """A position in mid-epoch, where a batch starts."""
    return num_samples // batch_size // 2 * batch_size


def _open(
    options: ResumeOptions,
    urls: Sequence[str],
    endpoint: str | None,
    *,
    cache_dir: Path,
    shuffle_window: int | Literal["all"] = "all",
    with_keys: bool = False,
    state: dict[str, Any] | None = None,
) -> "Loader":
    import dali_pipes as dp

    return dp.loader(
        list(urls),
        dp.segmentation(crop=options.crop),
        batch_size=options.batch_size,
        seed=options.seed,
        device=options.device,
        num_threads=options.num_threads,
        cache_dir=cache_dir,
        shuffle_window=shuffle_window,
        with_keys=with_keys,
        state=state,
        show_progress=False,
        endpoint=endpoint,
    )


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


def _take_open(loader: "Loader", where: Where, *, epoch: int) -> _Turn:
    started = time.perf_counter()
    _go_to(loader, where, epoch)
    _touch(next(loader)[0])
    return _Turn(time.perf_counter() - started)


def _take_opening(
    open_loader: Callable[[dict[str, Any] | None], "Loader"], where: Where, state: dict[str, Any]
) -> _Turn:
    started = time.perf_counter()
    with open_loader(state if where == "resume" else None) as loader:
        _touch(next(loader)[0])
        return _Turn(time.perf_counter() - started)


def _take_cold(options: ResumeOptions, cold: _Cold, where: Where, cache_dir: Path, scenario: str) -> _Turn:
    """On an empty cache, which is removed afterwards."""
    held, state = cold.held, cold.state if where == "resume" else None
    is_held, is_told_later = scenario == "cold, others held back", scenario == "cold, told later"
    cache_dir.mkdir()
    try:
        with ExitStack() as stack:
            if is_held:
                stack.enter_context(held.all_but(cold.named[where]))
                # Not a wait without end, whoever is wrong.
                timer = threading.Timer(PATIENCE_S, held.release)
                timer.daemon = True
                timer.start()
                stack.callback(timer.cancel)
            started = time.perf_counter()
            with _open(
                options,
                cold.urls,
                cold.endpoint,
                cache_dir=cache_dir,
                shuffle_window=cold.shuffle_window,
                state=None if is_told_later else state,
            ) as loader:
                if is_told_later and state is not None:
                    loader.load_state_dict(state)
                _touch(next(loader)[0])
                elapsed_s = time.perf_counter() - started
                if not is_held:
                    return _Turn(elapsed_s)
                return _Turn(elapsed_s, num_held=len(held.asked), was_released=held.is_open)
    finally:
        shutil.rmtree(cache_dir)


def _pack(shards: "ShardSet", endpoint: str, held: HeldBack, folder: Path, options: ResumeOptions) -> _Cold:
    """The samples of the shards in more shards, in a bucket of the server; and which of them first batches name."""
    from bench.scenarios.windows import _read_source
    from dali_pipes.store.ais import AisStore
    from dali_pipes.store.urls import resolve_shards
    from prep.index import index_shards
    from prep.pack.pack import pack

    source: Source = _read_source(shards)
    num_samples = len(source.records)
    if num_samples < 3 * options.batch_size:
        raise DataError(
            f"'{shards.url}' holds {num_samples} samples, which are less than three batches of {options.batch_size}; "
            "lower --batch-size, or name more shards"
        )
    store = AisStore(endpoint, BUCKET)
    max_count = -(-num_samples // options.cold_shards)
    # What the given shards hold was checked by who packed them.
    pack(
        source,
        store=store,
        prefix=PREFIX,
        max_count=max_count,
        max_bytes=MAX_SHARD_BYTES,
        on_bad="keep",
        show_progress=True,
    )
    manifest = index_shards(resolve_shards(store.locate(PREFIX), endpoint=endpoint), show_progress=True)
    window = max(int(manifest.shard_bytes.max()), int(manifest.total_bytes) // options.cold_windows)
    urls = [f"ais://{BUCKET}/{name}" for name in manifest.names]
    row_of = {record.key: row for row, record in enumerate(source.records)}
    named: dict[Where, frozenset[str]] = {}
    (folder / "named").mkdir()
    with _open(options, urls, endpoint, cache_dir=folder / "named", shuffle_window=window, with_keys=True) as loader:
        state = _state_in(loader, epoch=0)
        for where in WHERE:
            _go_to(loader, where, 0)
            named[where] = named_shards(manifest, [row_of[key] for key in next(loader)[0]["key"]])
    shutil.rmtree(folder / "named")
    return _Cold(manifest=manifest, endpoint=endpoint, held=held, shuffle_window=window, named=named, state=state)


@contextmanager
def _serve(directory: Path, held: HeldBack) -> Iterator[str]:
    """The endpoint of an embedded node in this process, whose shards can be held back."""
    with Storage(directory) as storage, NodeServer(storage, port=0) as server:
        handler = cast("type[BaseHTTPRequestHandler]", server.RequestHandlerClass)
        server.RequestHandlerClass = _gated(handler, held)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server.endpoint
        finally:
            held.release()
            server.shutdown()
            thread.join()


def _gated(handler: type[BaseHTTPRequestHandler], held: HeldBack) -> type[BaseHTTPRequestHandler]:
    """The handler with a wait before a shard's bytes are given. Shard indexes and the manifest are always answered."""

    def parse_request(self: BaseHTTPRequestHandler) -> bool:
        is_parsed = handler.parse_request(self)
        path = unquote(getattr(self, "path", "").partition("?")[0])
        if is_parsed and self.command == "GET" and path.startswith("/v1/objects/") and path.endswith(".tar"):
            held.wait(path.rpartition("/")[2])
        return is_parsed

    return type(f"Gated{handler.__name__}", (handler,), {"parse_request": parse_request})


def _record(scenario: str, results: dict[Where, list[_Turn]]) -> dict[str, Any]:
    spreads = {where: Spread.of([turn.first_batch_s for turn in turns]) for where, turns in results.items()}
    start, resume = spreads["epoch start"], spreads["resume"]
    record: dict[str, Any] = {
        "scenario": scenario,
        "epoch_start_s": start.median,
        "resume_s": resume.median,
        "ratio": resume.median / start.median,
        "is_within_bar": resume.median <= BAR * start.median,
        "spread": {"epoch_start_s": [start.min, start.max], "resume_s": [resume.min, resume.max]},
        "repeats": {where.replace(" ", "_"): [turn._asdict() for turn in turns] for where, turns in results.items()},
    }
    if scenario == "cold, others held back":
        record["waits_for_others"] = any(turn.was_released for turn in results["resume"])
        record["num_held_back"] = [turn.num_held for turn in results["resume"]]
    return record


def format_resume(report: dict[str, Any]) -> str:
    """A row a scenario, and below what the figures are of."""
    rows = [["first batch", "epoch's start ms", "resume in mid-epoch ms", "ratio"]]
    for record in report["records"]:
        cells = []
        for name in ("epoch_start_s", "resume_s"):
            low, high = record["spread"][name]
            cells.append(f"{1000 * record[name]:.0f} ({1000 * low:.0f}-{1000 * high:.0f})")
        rows.append([record["scenario"], *cells, f"{record['ratio']:.2f}"])
    last = report["records"][-1]
    named, others = report["cold_named"]["resume"], max(last["num_held_back"])
    verdict = (
        f"did not come within {PATIENCE_S:g} s: IT WAITS FOR OTHERS"
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
