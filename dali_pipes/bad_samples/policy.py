"""Bad samples: which ones were met and why, what is done about them, and when it is too many.

A sample is bad if the shard index says so (a GIF, too many pixels), if a component cannot be parsed, or if DALI cannot
decode it. ``on_error="raise"`` names it and stops; ``"substitute"`` writes it down and has another stand in for it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import DecodeError
from dali_pipes.formats.photo_header import MAX_PIXELS
from dali_pipes.reader.samples import Batch

if TYPE_CHECKING:
    from dali_pipes.bad_samples.quarantine import Quarantine

__all__ = ["BadSample", "BadSamplePolicy", "BadSamplesSeen", "OnError"]

_log = logging.getLogger(__name__)

OnError = Literal["raise", "substitute"]
# Keys of a batch that an error names.
NUM_NAMED = 8

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class BadSamplePolicy:
    """What is done about a sample that cannot be read."""

    on_error: OnError = "raise"
    max_bad: int = 100
    """How many different ones a rank may meet before it is an error."""
    max_pixels: int = MAX_PIXELS
    """A photo of more is bad: decoding it would take gigabytes."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error must be one of {', '.join(get_args(OnError))}, got {self.on_error!r}")
        if self.max_bad < 0:
            raise ValueError(f"max_bad must not be negative, got {self.max_bad}")
        if self.max_pixels < 1:
            raise ValueError(f"max_pixels must be positive, got {self.max_pixels}")


class BadSample(NamedTuple):
    """One that was met."""

    shard: str
    key: str
    component: str
    """The one that is at fault; empty where that is not known."""
    cause: str

    def __str__(self) -> str:
        component = f"component '{self.component}' " if self.component else ""
        return f"shard '{self.shard}', key '{self.key}': {component}{self.cause}"


class BadSamplesSeen:
    """Those that one loader has met, by ordinal; each is counted, logged and written down once.

    Args:
        policy: What is done about them.
        quarantine: Where they are written down.
    """

    def __init__(self, policy: BadSamplePolicy, *, quarantine: "Quarantine | None") -> None:
        self.policy = policy
        self.met: dict[int, BadSample] = {}
        """Ordinal -> what is known of it, in the order in which they were met."""
        self._ordinals = np.empty(0, np.int64)
        self._quarantine = quarantine

    def positions(self, batch: Batch) -> list[int]:
        """Where in a batch those stand that are known already."""
        if not len(self._ordinals):
            return []
        return np.flatnonzero(np.isin(batch.ordinals, self._ordinals)).tolist()

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self.met

    def add(self, batch: Batch, problems: Mapping[int, tuple[str, str]]) -> None:
        """Take note of a batch's bad samples.

        Args:
            batch: That they stand in.
            problems: Position in the batch -> the component that is at fault, and why.

        Raises:
            DecodeError: If they are not to be substituted, or with those that are new they are too many; names them.
            StoreError: If they cannot be written down.
        """
        found: dict[int, BadSample] = {}
        for position, (component, cause) in sorted(problems.items()):
            shard, key = batch.name(position)
            found.setdefault(int(batch.ordinals[position]), BadSample(shard, key, component, cause))
        if self.policy.on_error == "raise":
            first, *others = found.values()
            names = ", ".join(f"'{other.key}'" for other in others[:NUM_NAMED])
            more = f"; bad in this batch as well: {names}{', ...' if len(others) > NUM_NAMED else ''}" if others else ""
            raise DecodeError(
                f"{first}{more}; leave it out (exclude=), or have others stand in for bad samples "
                "(on_error='substitute')"
            )
        new = {ordinal: bad for ordinal, bad in found.items() if ordinal not in self.met}
        for ordinal, bad in new.items():
            if self._quarantine is not None:
                self._quarantine.add(*bad)  # first: what cannot be written is tried again
            self.met[ordinal] = bad
            _log.warning("bad sample, another stands in for it: %s", bad)
        self._ordinals = np.array(list(self.met), np.int64)
        if new and len(self.met) > self.policy.max_bad:
            where = f", all in '{self._quarantine.path}'" if self._quarantine is not None else ""
            last = list(self.met.values())[-1]
            raise DecodeError(
                f"{len(self.met)} samples are bad, max_bad={self.policy.max_bad} are let pass{where}; the last: "
                f"{last}; look at the data, leave them out (exclude=), or raise max_bad"
            )
