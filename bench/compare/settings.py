"""Define the settings of a turn, and combine the axes of a sweep, such as ``threads=1,2``, to settings."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from bench.loaders.protocol import LoaderOptions
from bench.tools.environment import available_cores

Cache = Literal["warm", "cold"]

MAX_RANKS = 64
MAX_SETTINGS = 1000


@dataclass(frozen=True, kw_only=True)
class TurnSetting:
    """One point of a sweep: what may differ between the turns of one loader. ``None`` changes nothing."""

    threads: int | None = None
    """DALI's threads, or worker processes, of one rank; ``None``: the cores, shared out among the ranks."""
    batch_size: int = 64
    """Samples a batch, of one rank."""
    crop: int = 350
    """Side of the centre crop."""
    ranks: int = 1
    """Processes, each with its own loader over its share of the shards, which begin and end an epoch together."""
    cache: Cache = "warm"
    """``warm``: timed are epochs after the first. ``cold``: the first, from before the loader is made, and what of the
    shards the page cache holds is dropped before."""
    compute_ms: float = 0.0
    """Of an emulated training step with a whole batch; a short one takes its share of it."""
    latency_ms: float | None = None
    """Added to each request by a gateway; 0 is a gateway that adds nothing. ``None`` for local shards."""
    shards: int | None = None
    """Pack the samples anew into this number of shards."""
    photo_side: int | None = None
    """Scale photos to this longer side, in pixels, and their masks with them."""

    def __post_init__(self) -> None:
        for name in ("threads", "batch_size", "crop", "ranks", "shards", "photo_side"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.ranks > MAX_RANKS:
            raise ValueError(f"ranks must be at most {MAX_RANKS}, got {self.ranks}: they are processes of this machine")
        if self.cache not in get_args(Cache):
            raise ValueError(f"cache must be one of {', '.join(get_args(Cache))}, got '{self.cache}'")
        for name in ("compute_ms", "latency_ms"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 60_000:
                raise ValueError(f"{name} must be in [0, 60000), got {value:g}")
        if self.shards is not None and self.shards < self.ranks:
            raise ValueError(f"each rank needs a shard, got shards={self.shards} with ranks={self.ranks}")

    @property
    def data(self) -> tuple[int | None, int | None]:
        """The part that decides which shards are read."""
        return self.shards, self.photo_side

    def apply(self, options: LoaderOptions) -> LoaderOptions:
        """A run's options with this setting's."""
        return replace(
            options,
            batch_size=self.batch_size,
            num_threads=self.num_threads,
            crop=self.crop,
            keeps_shards=self.cache == "warm",
        )

    @property
    def num_threads(self) -> int:
        """Of one rank; at least 1.

        >>> TurnSetting(threads=3).num_threads
        3
        """
        return self.threads or max(1, available_cores() // self.ranks)

    def to_json(self) -> dict[str, Any]:
        """The fields by name, the threads as they are."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"threads": self.num_threads}


AXES: Mapping[str, type] = {
    "threads": int,
    "ranks": int,
    "batch-size": int,
    "crop": int,
    "photo-side": int,
    "shards": int,
    "latency-ms": float,
    "compute-ms": float,
    "cache": str,
}
"""What can be swept, and the type of its values."""

ALIASES: Mapping[str, str] = {"num-threads": "threads", "num-shards": "shards"}
"""The names of the options."""


def parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """Read ``NAME=VALUE,VALUE,...``.

    Raises:
        ValueError: If there is no such axis, a value is of another kind, or one comes twice.

    >>> parse_axis("threads=1,2")
    ('threads', (1, 2))
    """
    name, mark, listed = text.partition("=")
    if not mark:
        raise ValueError(f"--over expects NAME=VALUE,VALUE,..., got '{text}'")
    name = ALIASES.get(name, name)
    if name not in AXES:
        raise ValueError(f"--over: NAME must be one of {', '.join(AXES)}, got '{name}' in '{text}'")
    kind = AXES[name]
    try:
        values = tuple(kind(word.strip()) for word in listed.split(","))
    except ValueError:
        wanted = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"--over: {name} expects {wanted} with commas between them, got '{listed}'") from None
    if len(set(values)) != len(values):
        raise ValueError(f"--over: the values of {name} must not repeat, got '{listed}'")
    return name, values


def sweep(base: TurnSetting, texts: Sequence[str]) -> list[TurnSetting]:
    """Every combination of the axes, the last one changing fastest; all else as in ``base``.

    Raises:
        ValueError: As `parse_axis`; if an axis is named twice, a combination is none, or there are more than a
            thousand.
    """
    axes = [parse_axis(text) for text in texts]
    names = [name for name, _ in axes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"--over: {twice} is named twice; give all its values at once")
    settings = [
        replace(base, **{name.replace("-", "_"): value for name, value in zip(names, values, strict=True)})
        for values in itertools.islice(itertools.product(*(values for _, values in axes)), MAX_SETTINGS + 1)
    ]
    if len(settings) > MAX_SETTINGS:
        raise ValueError(f"--over: more than {MAX_SETTINGS} combinations")
    return settings
