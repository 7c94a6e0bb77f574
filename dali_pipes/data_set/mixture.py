"""Name several data sets that a loader reads as one."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dali_pipes.store.urls import ShardUrls


@dataclass(frozen=True)
class Mixture:
    """Several data sets that a loader reads as one: ``Mixture({"pets": "ais://pets/shuffled-", "own": "/data/cats"})``.

    Args:
        sets: Name -> shards, as `dali_pipes.loader` takes them: URLs, braces, globs, lists. The names become parts of
            the shards' names in messages and in lists of samples. The order of the sets matters: the same sets in
            another order are another data set, with another order of samples.
        weights: Name -> this set's part of the samples that are read, relative to the others. With ``None`` an epoch
            reads every sample of all sets once.
        etl: Name -> the ETL through which this set's shards are read, for some or all of the sets; see
            `dali_pipes.Shards`.

    Raises:
        TypeError: If ``sets``, ``weights`` or ``etl`` is not a mapping, a name is not a text or a weight not a number.
        ValueError: If there is no set, a name cannot be a part of an object's name, the weights' names are not exactly
            the sets', a weight is not positive and finite, or an ETL is given for an unknown set.
    """

    sets: Mapping[str, ShardUrls]
    weights: Mapping[str, float] | None = field(default=None, kw_only=True)
    etl: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        """Check the arguments and copy them, because the caller may change its mappings."""
        if not isinstance(self.sets, Mapping):
            raise TypeError(f"sets must be a mapping of names to shards, got {type(self.sets).__name__}")
        if not self.sets:
            raise ValueError("a mixture must have at least one data set, got none")
        for name in self.sets:
            _check_name(name)
        sets = {name: shards if isinstance(shards, str | Path) else tuple(shards) for name, shards in self.sets.items()}
        object.__setattr__(self, "sets", sets)
        if self.weights is not None:
            object.__setattr__(self, "weights", _checked_weights(self.weights, sets))
        if not isinstance(self.etl, Mapping):
            raise TypeError(f"etl must be a mapping of data sets' names to ETLs, got {type(self.etl).__name__}")
        if unknown := sorted(map(str, self.etl.keys() - sets.keys())):
            raise ValueError(f"etl must be given for some of the sets {_quoted(sets)}, got one for {_quoted(unknown)}")
        object.__setattr__(self, "etl", dict(self.etl))


def _quoted(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a data set's name must be a text, got {name!r}")
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise ValueError(
            "a data set's name must not be empty, '.' or '..', nor hold a '/' or an unprintable character, "
            f"got {name!r:.60}"
        )


def _checked_weights(weights: object, sets: Mapping[str, ShardUrls]) -> dict[str, float]:
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a mapping of names to numbers, got {type(weights).__name__}")
    if weights.keys() != sets.keys():
        missing, unknown = sorted(sets.keys() - weights.keys()), sorted(map(str, weights.keys() - sets.keys()))
        found = [f"none for {_quoted(missing)}"] if missing else []
        found += [f"one for {_quoted(unknown)}"] if unknown else []
        raise ValueError(f"weights must be given for exactly the sets {_quoted(sets)}, got {'; '.join(found)}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise TypeError(f"a weight must be a number, got {weight!r} for '{name}'")
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"a weight must be positive and finite, got {weight!r} for '{name}'")
    return {name: float(weights[name]) for name in sets}
