"""The settings of a turn, the facts of its data, and the axes of a sweep, such as ``threads=1,2``."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import click

from bench.engine.options import at_least, option
from bench.loaders.protocol import LoaderOptions
from bench.reports.summary import setting_text
from bench.tools.environment import available_cores

Cache = Literal["warm", "cold"]

MILLISECONDS = click.FloatRange(min=0, max=60_000, max_open=True)
MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class TurnSetting:
    """One point of a sweep: the values that may differ between the turns of one loader. ``None`` changes nothing."""

    threads: int | None = option(
        type=at_least(1),
        name="--num-threads",
        help="DALI's threads, or worker processes of each rank.  [default: the cores, shared by the ranks]",
    )
    ranks: int = option(1, help="Processes, each with its own loader over its share of the shards.")
    batch_size: int = option(64, help="Samples a batch of each rank.")
    crop: int = 350
    cache: Cache = option(
        "warm",
        type=click.Choice(get_args(Cache)),
        help="cold: time the first epoch, with opening; before it, the files are dropped from the page cache.",
    )
    compute_ms: float = option(
        0.0, type=MILLISECONDS, help="Emulate a training step of this length: asleep on a CPU, at work on a GPU."
    )
    latency_ms: float | None = option(
        type=MILLISECONDS,
        help="Add this delay to each request. Local shards are copied, and a server of our own serves them.",
    )
    shards: int | None = option(
        type=at_least(1), name="--num-shards", help="Pack the samples into this number of new shards."
    )
    photo_side: int | None = option(type=at_least(1), help="Scale photos and masks to this longer side.")

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

    def __str__(self) -> str:
        return setting_text(self.to_json())

    @property
    def num_threads(self) -> int:
        return self.threads or max(1, available_cores() // self.ranks)

    def apply(self, options: LoaderOptions) -> LoaderOptions:
        return replace(
            options,
            batch_size=self.batch_size,
            num_threads=self.num_threads,
            crop=self.crop,
            keeps_shards=self.cache == "warm",
        )

    def to_json(self) -> dict[str, Any]:
        """The fields by name, with the number of threads that is used."""
        return asdict(self) | {"threads": self.num_threads}


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """A description of a data set, for records; equal for two records of the same data."""

    num_samples: int
    num_shards: int
    shard_bytes: int
    needed_bytes: int
    """Bytes of the components that loaders need: photo, mask, label."""
    digest: str
    """The manifest's digest: it is the same for the same shards, wherever they lie."""


AXES = tuple(field.name for field in fields(TurnSetting))
"""The settings that can be swept; ``--over`` writes their names with dashes."""
ALIASES = {"num_threads": "threads", "num_shards": "shards"}
_TYPES: dict[str, type] = {"compute_ms": float, "latency_ms": float, "cache": str}


def sweep(base: TurnSetting, texts: Sequence[str]) -> list[TurnSetting]:
    """Return ``base`` with every combination of axes ``NAME=VALUE,VALUE,...``, the last one changing fastest.

    >>> [setting.threads for setting in sweep(TurnSetting(), ["threads=1,2"])]
    [1, 2]
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        option, _, listed = text.partition("=")
        name = option.replace("-", "_")
        name = ALIASES.get(name, name)
        if name not in AXES:
            names = ", ".join(AXES).replace("_", "-")
            raise ValueError(f"--over expects NAME=VALUE,VALUE,... with NAME one of {names}, got '{text}'")
        try:
            values = tuple(_TYPES.get(name, int)(word.strip()) for word in listed.split(","))
        except ValueError:
            raise ValueError(f"--over: {option} expects numbers separated by commas, got '{listed}'") from None
        if len(set(values)) != len(values) or name in axes:
            raise ValueError(f"--over: name {name} once, and each of its values once, got '{text}'")
        axes[name] = values
    return [replace(base, **dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
