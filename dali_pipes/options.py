"""Group the arguments of `dali_pipes.loader`: selection, shuffle, bad samples, cache, decoding, outputs.

Each class is frozen and checks its values when it is made. All values but the function `Select.where` are plain, so a
configuration file can hold them: ``dp.Shuffle(**config["shuffle"])``.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

from dali_pipes.fetch.fetcher import NUM_FETCHERS
from dali_pipes.formats.photo_header import MAX_PIXELS

if TYPE_CHECKING:
    from dali_pipes.formats.sample_columns import Where
    from dali_pipes.store.urls import ShardUrls


Missing = Literal["error", "skip", "empty"]
OnError = Literal["raise", "substitute"]
Labels = Literal["raw", "contiguous"]
Paths = str | Path | Iterable[str | Path]

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")


@dataclass(frozen=True)
class Shards:
    """Shards that are read through an ETL: ``dp.Shards("ais://pets/shuffled-", etl="small-pets")``."""

    urls: "ShardUrls"
    """As `dali_pipes.loader` takes them: a URL, a pattern, a directory or a list of these."""
    etl: str | None = None
    """The ETL, which runs in the cluster (``dali-pipes prep etl start``) and gives every shard. Transformed shards are
    another data set than the stored ones: they are indexed on their own (``dali-pipes prep index URL --etl NAME``) and
    lie in another cache file. The transform must give the same bytes each time. ``None``: the shards as stored. For
    the data sets of a mixture see `dali_pipes.Mixture`."""

    def __post_init__(self) -> None:
        if isinstance(self.urls, Iterable) and not isinstance(self.urls, str):
            object.__setattr__(self, "urls", tuple(self.urls))
        if self.etl is not None and not isinstance(self.etl, str):
            raise TypeError(f"etl must be the name of an ETL, got {self.etl!r}")


@dataclass(frozen=True, kw_only=True)
class Select:
    """Which samples an epoch has. All are inputs of the order."""

    exclude: Paths = ()
    """Files that list samples to leave out: quarantine files, or lists with one key a line. ``"/logs/bad-*.tsv"`` names
    all files that match."""
    where: "Where | None" = None
    """A predicate. It is called once with `dali_pipes.formats.sample_columns.Columns` and returns bool [samples],
    ``True`` for the samples that stay: ``lambda columns: columns.labels == 3``."""
    oversample: Mapping[int, float] | None = None
    """Class id, as ``cls`` holds it, to a factor: 2 reads each sample of the class twice in an epoch, 0.5 every other
    one, others in each epoch; see `dali_pipes.order.selection.Selection`."""
    missing: Missing = "error"
    """What to do with a sample that lacks a component that the graph takes. ``"error"``: refuse the data set.
    ``"skip"``: leave the sample out. ``"empty"``: keep it, with no bytes, a photo of one black pixel or a class id of
    -1; ``components.present(name)`` tells the graph which samples these are."""
    epoch_samples: int | None = None
    """Samples of an epoch over all ranks, of an endless stream: the next epoch goes on where this one stopped.
    ``None``: all samples once; for a mixture with weights, the shortest epoch that has all samples at least once."""

    def __post_init__(self) -> None:
        if not isinstance(self.exclude, str | Path):
            object.__setattr__(self, "exclude", tuple(self.exclude))
        if self.where is not None and not callable(self.where):
            raise TypeError(f"where must be a function of the columns, or None, got {self.where!r}")
        if self.oversample is not None and not isinstance(self.oversample, Mapping):
            raise TypeError(
                f"oversample must be a mapping of class ids to factors, got {type(self.oversample).__name__}"
            )
        _check_choice("missing", self.missing, Missing)
        _keep_integer(self, "epoch_samples", at_least=1, none=True)


@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """How the samples are shuffled. All are inputs of the order."""

    window_bytes: int | Literal["all"] = "all"
    """Bytes of shards that are shuffled together, and resident together: two windows must fit the cache. ``"all"``: an
    exact global shuffle, of shards that all fit."""
    ramp_up: bool = False
    """Start each epoch with windows of 1, 2, 4, ... shards, so that its first batch waits for one shard only."""
    slices: int = 1
    """Nodes that each stage a share of the shards; shorter slices repeat their first samples."""
    enabled: bool = True
    """``False`` reads in the manifest's order, as ``shuffle=False`` does, in windows and slices as given here."""

    def __post_init__(self) -> None:
        if self.window_bytes != "all":
            _keep_window(self)
        _check_bool("ramp_up", self.ramp_up)
        _keep_integer(self, "slices", at_least=1)
        _check_bool("enabled", self.enabled)


@dataclass(frozen=True, kw_only=True)
class BadSamples:
    """What to do about samples that cannot be read or decoded."""

    on_error: OnError = "raise"
    """``"raise"``: stop, and name shard, key, component and cause. ``"substitute"``: the nearest good sample before it
    in its batch takes its place (after it, if there is none; in a batch of bad samples only, a neighbour in the shard,
    else in the next shard), so that batches keep their number and size. ``loader.substituted`` says where that was."""
    max_bad: int = 100
    """Stop when this rank has seen more different bad samples than this."""
    max_pixels: int = MAX_PIXELS
    """Photos of more pixels are bad: decoding them would take gigabytes."""
    quarantine: str | Path | None = None
    """The file that lists bad samples, for the next job's ``exclude=``; ``{rank}`` in its name is this rank's number.
    ``None``: ``quarantine-DIGEST-rank{rank}.tsv`` in the working directory, where DIGEST is the manifest's. It is made
    with the first bad sample, and only for ``on_error="substitute"``."""

    def __post_init__(self) -> None:
        _check_choice("on_error", self.on_error, OnError)
        _keep_integer(self, "max_bad", at_least=0)
        _keep_integer(self, "max_pixels", at_least=1)
        _check_path("quarantine", self.quarantine)


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Where shards are staged, and how."""

    directory: str | Path | None = None
    """A local directory for the cache file. The file stays there for the next job, and all loaders on this node that
    name the directory share it. ``None``: shared memory if the shards fit there, else the directory for temporary
    files; shared as well, and removed with the last loader."""
    max_bytes: int | None = None
    """The most that all cache files in that directory may take. ``None``: half of what is free in memory, or nine
    tenths of what is free on a disk; never more than the file system and the container's memory limit allow."""
    fetchers: int = NUM_FETCHERS
    """Shards in flight."""
    show_progress: bool = True
    """Draw a bar while the first window is staged, if stderr is a terminal; on rank 0 only."""

    def __post_init__(self) -> None:
        _check_path("directory", self.directory)
        _keep_integer(self, "max_bytes", at_least=1, none=True)
        _keep_integer(self, "fetchers", at_least=1)
        _check_bool("show_progress", self.show_progress)


@dataclass(frozen=True, kw_only=True)
class Decode:
    """How batches are decoded. None of these is an input of the order."""

    threads: int | None = None
    """Decoding threads. ``None``: as the tuning file says, else one for each core that the process may use, or its
    share of those that the launcher lets all ranks of this host use."""
    queue_depth: int | None = None
    """Batches decoded ahead. ``None``: as the tuning file says, else 2."""
    engine_share: float | None = None
    """Share of a batch's JPEGs that the GPU's JPEG engines decode, 0 to 1, in decoders of the graph that do not set
    DALI's ``hw_decoder_load`` themselves. ``None``: as the tuning file says, else DALI's own default."""
    tuning: str | Path | None = None
    """The file that ``dali-pipes tune`` wrote. ``None``: the file that ``DALI_PIPES_TUNING`` names, if any. The other
    arguments here come first. The file of another machine is not used, which is logged once."""

    def __post_init__(self) -> None:
        _keep_integer(self, "threads", at_least=1, none=True)
        _keep_integer(self, "queue_depth", at_least=1, none=True)
        share = self.engine_share
        if share is not None:
            if isinstance(share, bool) or not isinstance(share, int | float):
                raise TypeError(f"engine_share must be a number, got {share!r}")
            if not 0 <= share <= 1:
                raise ValueError(f"engine_share must be in [0, 1], got {share}")
        _check_path("tuning", self.tuning)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What batches hold besides the graph's outputs, and which class ids."""

    keys: bool = False
    """Add ``"key"``, a list of str, to each batch."""
    valid: bool = False
    """Add ``"valid"``, bool [batch], to each batch: ``False`` where another sample stands in for a bad one, and where a
    rank has nothing in a ``PARTIAL`` last step."""
    labels: Labels = "raw"
    """``"raw"``: class ids as ``cls`` holds them. ``"contiguous"``: from 0, by the manifest's class table."""

    def __post_init__(self) -> None:
        _check_bool("keys", self.keys)
        _check_bool("valid", self.valid)
        _check_choice("labels", self.labels, Labels)


def _same(names: str) -> dict[str, str]:
    return {name: name for name in names.split()}


def _in_group(group: str, **names: str) -> dict[str, str]:
    return {old: f"{group}({new}=...)" for old, new in names.items()}


# Arguments that `dali_pipes.loader` once had, and attributes of the option classes -> what is passed.
NEW_FORMS: Mapping[str, str] = {
    **_in_group("select=dali_pipes.Select", **_same("exclude where oversample missing epoch_samples")),
    **_in_group("shuffle=dali_pipes.Shuffle", shuffle_window="window_bytes", num_slices="slices", **_same("ramp_up")),
    **_in_group("bad_samples=dali_pipes.BadSamples", **_same("on_error max_bad max_pixels quarantine")),
    **_in_group("cache=dali_pipes.Cache", cache_dir="directory", cache_bytes="max_bytes", num_fetchers="fetchers"),
    **_in_group("cache=dali_pipes.Cache", **_same("show_progress")),
    **_in_group("decode=dali_pipes.Decode", num_threads="threads", prefetch_queue_depth="queue_depth"),
    **_in_group("decode=dali_pipes.Decode", hw_decoder_load="engine_share", **_same("tuning")),
    **_in_group("outputs=dali_pipes.Outputs", with_keys="keys", with_valid="valid", **_same("labels")),
    **_in_group("shuffle=dali_pipes.Shuffle", **_same("enabled window_bytes slices")),
    **_in_group("cache=dali_pipes.Cache", **_same("directory max_bytes fetchers")),
    **_in_group("decode=dali_pipes.Decode", **_same("threads queue_depth engine_share")),
    **_in_group("outputs=dali_pipes.Outputs", **_same("keys valid")),
    "local_rank": 'device="cuda:N"',
    "etl": "dali_pipes.Shards(urls, etl=...) as the shards",
    **{name: f"loader.as_dali({name}=...)" for name in ("output_map", "column_labels", "auto_reset")},
}


def refuse_old_arguments(names: Iterable[str]) -> None:
    """Refuse arguments that `dali_pipes.loader` once had, or that an option class has.

    Raises:
        TypeError: Names the first of them, and its new form.
    """
    for name in names:
        if name in NEW_FORMS:
            verb = "use" if name in ("output_map", "column_labels", "auto_reset") else "pass"
            raise TypeError(f"loader() has no argument '{name}'; {verb} {NEW_FORMS[name]}")


def names_new_form(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Have a function refuse `NEW_FORMS`' old arguments with their new form; its signature stays."""

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
        refuse_old_arguments(kwargs)
        return function(*args, **kwargs)

    return checked


def as_integer(name: str, value: object) -> int:
    """``value`` as an int.

    Raises:
        TypeError: If it is not an integer: a float would give another order.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def _keep_integer(options: object, name: str, *, at_least: int, none: bool = False) -> None:
    """Check one attribute of an option class, and keep it as a plain int."""
    if none and getattr(options, name) is None:
        return
    value = as_integer(name, getattr(options, name))
    if value < at_least:
        expected = "be positive" if at_least else "not be negative"
        raise ValueError(f"{name} must {expected}, got {value}")
    object.__setattr__(options, name, value)


def _keep_window(shuffle: Shuffle) -> None:
    try:
        _keep_integer(shuffle, "window_bytes", at_least=1)
    except (TypeError, ValueError):
        raise ValueError(
            f"window_bytes must be 'all' or a positive number of bytes, got {shuffle.window_bytes!r}"
        ) from None


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def _check_choice(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def _check_path(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str | Path):
        raise TypeError(f"{name} must be a path or None, got {value!r}")
