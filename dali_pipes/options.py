"""Group the arguments of `dali_pipes.loader`: selection, shuffle, bad samples, cache, decoding, outputs.

Each class is frozen and checks types and values when it is made; of numpy's it takes numbers and bools, see
`dali_pipes.arguments`. All values but the function `Select.where` are plain, so a configuration file can hold them:
``dp.Shuffle(**config["shuffle"])``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_origin

from dali_pipes.arguments import as_bool, as_integer, as_number, check_choice, refuse_unknown
from dali_pipes.cache.cache import Verify
from dali_pipes.fetch.fetcher import NUM_FETCHERS
from dali_pipes.formats.photo_header import MAX_PIXELS
from dali_pipes.order.inputs import Buckets
from dali_pipes.store.patience import PATIENCE_S, as_seconds

if TYPE_CHECKING:
    from dali_pipes.formats.sample_columns import Where
    from dali_pipes.store.urls import ShardUrls


Missing = Literal["error", "skip", "empty"]
OnError = Literal["raise", "substitute"]
Labels = Literal["raw", "contiguous"]
ReaderKind = Literal["auto", "aio", "webdataset"]
Paths = str | Path | Iterable[str | Path]


@dataclass(frozen=True)
class Shards:
    """Shards that are read through an ETL: ``dp.Shards("ais://pets/shuffled-", etl="small-pets")``."""

    urls: "ShardUrls"
    """A URL, a pattern, a directory or a list of these, as `dali_pipes.loader` takes them."""
    etl: str | None = None
    """The name of an ETL that runs in the cluster (``dali-pipes prep etl start``); every shard is read through it.
    Transformed shards are another data set than the stored ones: they are indexed separately (``dali-pipes prep index
    URL --etl NAME``) and lie in another cache file. The ETL must give the same bytes each time. ``None``: the shards as
    they are stored. For the data sets of a mixture see `dali_pipes.Mixture`."""

    def __post_init__(self) -> None:
        if isinstance(self.urls, Iterable) and not isinstance(self.urls, str):
            object.__setattr__(self, "urls", tuple(self.urls))
        if self.etl is not None and not isinstance(self.etl, str):
            raise TypeError(f"etl must be the name of an ETL, got {self.etl!r}")


class _Options:
    """Checks the fields that are bools, integers, choices or paths, and keeps them as plain Python values."""

    _may_be_zero: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *_: Any, **named: Any) -> Self:
        refuse_unknown(f"dali_pipes.{cls.__name__}", named, [field.name for field in fields(cls)])  # type: ignore[arg-type]
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # a subclass is a dataclass
            name, kind = field.name, field.type
            value: Any = getattr(self, name)
            if kind is bool:
                value = as_bool(name, value)
            elif kind is int or (kind == int | None and value is not None):
                value = as_integer(name, value)
                if value < (at_least := 0 if name in self._may_be_zero else 1):
                    raise ValueError(f"{name} must {'be positive' if at_least else 'not be negative'}, got {value}")
            elif kind == str | Path | None and not isinstance(value, str | Path | None):
                raise TypeError(f"{name} must be a path or None, got {value!r}")
            elif get_origin(kind) is Literal:
                check_choice(name, value, kind)
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Select(_Options):
    """Which samples an epoch has. All these values are inputs of the order."""

    exclude: Paths = ()
    """Files that list samples to leave out: quarantine files, or lists with one key a line. ``"/logs/bad-*.tsv"`` names
    all files that match."""
    where: "Where | None" = None
    """A function that selects samples. It is called with `dali_pipes.formats.sample_columns.Columns` and returns
    bool [samples], ``True`` for the samples that stay: ``lambda columns: columns.labels == 3``. It is called for some
    shards at a time, about a million samples, so it must judge each sample by that sample alone."""
    oversample: Mapping[int, float] | None = None
    """Class id, as ``cls`` holds it, to a factor. The factor 2 reads each sample of the class twice in an epoch; 0.5
    reads half of them, drawn anew for each epoch; see `dali_pipes.order.selection.Selection`."""
    missing: Missing = "error"
    """The treatment of a sample that lacks a component of the graph. ``"error"``: refuse the data set.
    ``"skip"``: leave the sample out. ``"empty"``: keep it, with no bytes, a photo of one black pixel or a class id of
    -1; ``components.present(name)`` tells the graph which samples these are."""
    epoch_samples: int | None = None
    """Samples of an epoch, over all ranks. Each epoch then continues where the one before stopped. ``None``: all
    samples once; for a mixture with weights, the shortest epoch in which each data set's part by weight is at least
    all its samples."""
    buckets: Buckets | None = None
    """What ``dali_pipes.buckets(area=, step=, max_aspect=)`` gives: each batch then has photos of about one aspect
    ratio, and its own height and width, which ``components.bucket_shape()`` tells the graph. See
    `dali_pipes.order.shaped.ShapedPlan`. ``None``: batches have any photos."""
    allow_missing: bool = False
    """``True``: read the data set without the shards that its manifest lists and the store lacks, and log their names.
    Without them it is another data set, with another order. ``False``: a missing shard is an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.exclude, str | Path | Iterable):
            raise TypeError(f"exclude must be a path or several paths, got {self.exclude!r}; () leaves out nothing")
        if not isinstance(self.exclude, str | Path):
            object.__setattr__(self, "exclude", tuple(self.exclude))
        if self.where is not None and not callable(self.where):
            raise TypeError(f"where must be a function of the columns, or None, got {self.where!r}")
        if self.oversample is not None and not isinstance(self.oversample, Mapping):
            raise TypeError(
                f"oversample must be a mapping of class ids to factors, got {type(self.oversample).__name__}"
            )
        if self.buckets is not None and not isinstance(self.buckets, Buckets):
            raise TypeError(f"buckets must be what dali_pipes.buckets(...) gives, or None, got {self.buckets!r}")


@dataclass(frozen=True, kw_only=True)
class Shuffle(_Options):
    """Options of the shuffle. All these values are inputs of the order."""

    window_bytes: int | Literal["all"] = "all"
    """Bytes of shards that are shuffled together, and resident together: two windows must fit the cache. ``"all"``: an
    exact global shuffle; all shards must fit the cache."""
    slices: int = 1
    """Parts of the shard list: a node stages only its own slices. Shorter slices repeat their first samples."""
    enabled: bool = True
    """``False`` reads in the manifest's order, as ``shuffle=False`` does, with the windows and slices given here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_bytes != "all":
            try:
                object.__setattr__(self, "window_bytes", as_integer("window_bytes", self.window_bytes))
                is_positive = self.window_bytes > 0
            except TypeError:
                is_positive = False
            if not is_positive:
                expected = "window_bytes must be 'all' or a positive number of bytes"
                raise ValueError(f"{expected}, got {self.window_bytes!r}")


@dataclass(frozen=True, kw_only=True)
class BadSamples(_Options):
    """The treatment of samples that cannot be read or decoded."""

    on_error: OnError = "raise"
    """``"raise"``: stop, and name shard, key, component and cause. ``"substitute"``: put another sample in the place of
    the bad one, so that batches keep their number and size. It is the nearest good sample before the bad one in its
    batch, else the nearest one after it; if the whole batch is bad, a neighbour in the shard, else a sample of the next
    shards. ``loader.substituted`` gives the positions."""
    max_bad: int = 100
    """Stop when this rank has seen more different bad samples than this."""
    max_pixels: int = MAX_PIXELS
    """Photos with more pixels are bad: decoding them would take gigabytes of memory."""
    quarantine: str | Path | None = None
    """The file that lists bad samples, for the next job's ``exclude=``; ``{rank}`` in its name becomes this rank's
    number. ``None``: ``quarantine-DIGEST-rank{rank}.tsv`` in the working directory, with the manifest's digest. It is
    made with the first bad sample, and only for ``on_error="substitute"``."""

    _may_be_zero = ("max_bad",)


@dataclass(frozen=True, kw_only=True)
class Cache(_Options):
    """Options of the cache, in which shards are staged."""

    directory: str | Path | None = None
    """A local directory for the cache file. The file stays there for the next job, and all loaders on this node that
    name the directory share it. ``None``: shared memory if the shards fit there, else the directory for temporary
    files; such a cache file is shared as well, and removed with the last loader."""
    max_bytes: int | None = None
    """The limit for all cache files in that directory together. ``None``: half of the free memory, or nine tenths of
    the free space on a disk; never more than the file system and the container's memory limit allow."""
    fetchers: int = NUM_FETCHERS
    """Threads that fetch shards. Each fetches one shard at a time, or several small ones."""
    verify: Verify = "first"
    """How often the checksums of shards that are in the cache file already are taken again: somebody may have changed
    them since. ``"first"``: once, when the first of the loaders at work needs the shard; all loaders that work at the
    same time share the result. ``"always"``: by every loader that did not fetch the shard itself. ``"never"``: only
    after the machine was restarted. A shard whose bytes are wrong is fetched again."""
    patience_s: float = PATIENCE_S
    """Seconds for which the loader waits for a cluster that is away: restarts, rebalances, limits its rate. It counts
    from the last byte of the shard that is missing. A line in the log says once a minute for whom it waits. ``0``:
    the first failure is final."""
    start_patience_s: float = 0.0
    """The same while the loader is made. By default an endpoint that does not answer is an error within seconds,
    because its name may be wrong. A job that a launcher starts again by itself can wait here, too."""
    show_progress: bool = True
    """Draw a bar while the first window is staged, if stderr is a terminal; on rank 0 only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("patience_s", "start_patience_s"):
            object.__setattr__(self, name, as_seconds(name, getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class Decode(_Options):
    """Options of decoding. No value here is an input of the order."""

    threads: int | None = None
    """Decoding threads. ``None``: as the tuning file says, else one for each core that the process may use. If the
    launcher lets all ranks of this host use the same cores, these are divided among the ranks."""
    queue_depth: int | None = None
    """Batches decoded ahead. ``None``: as the tuning file says, else 2."""
    engine_share: float | None = None
    """Share of a batch's JPEGs that the GPU's JPEG engines decode, 0 to 1, in decoders of the graph that do not set
    DALI's ``hw_decoder_load`` themselves. ``None``: as the tuning file says, else DALI's own default."""
    tuning: str | Path | None = None
    """The file that ``dali-pipes tune`` wrote. ``None``: the file that ``DALI_PIPES_TUNING`` names, if any. The other
    values of this class take precedence. A file that was made on another machine is not used; this is logged once."""
    reader: ReaderKind = "auto"
    """How encoded bytes are read from the cache file. ``"aio"``: a batch with one system call, by Linux's asynchronous
    I/O, into memory that is used again. ``"webdataset"``: by DALI's ``fn.readers.webdataset``. What stands
    before the decoder then takes 1.4 to 2.4 times the CPU time. ``"auto"``: the first, where the system allows it; a
    container's filter of system calls may not. Batches are the same."""
    max_batch_pixels: int | None = None
    """The largest number of pixels that the photos of a batch may have together, as stored; masks count, too. Decoded
    pixels take 3 bytes of memory each, for each batch that is decoded ahead. A batch with more is not decoded, but a
    `DecodeError` that names it. ``None``: as many as fit into this rank's part of the free memory, and at most
    4,294,967,296, which is 1,000 photos of 4 million pixels; at least ``BadSamples.max_pixels``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine_share is not None:
            share = as_number("engine_share", self.engine_share)
            if not 0 <= share <= 1:
                raise ValueError(f"engine_share must be in [0, 1], got {share}")
            object.__setattr__(self, "engine_share", share)


@dataclass(frozen=True, kw_only=True)
class Outputs(_Options):
    """Additional outputs of batches, and the kind of class ids."""

    keys: bool = False
    """Add ``"key"``, a list of str, to each batch. In a `dali_pipes.Mixture` a key is ``SET/KEY``."""
    valid: bool = False
    """Add ``"valid"``, bool [batch], to each batch: ``False`` where another sample replaces a bad one, where ``FILL``
    repeats a sample, and where a rank has no sample left in a ``PARTIAL`` last step."""
    labels: Labels = "raw"
    """``"raw"``: class ids as ``cls`` holds them. ``"contiguous"``: from 0, by the manifest's class table."""
