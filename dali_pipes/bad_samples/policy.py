"""Remember the bad samples that a rank has seen, and stop when they are too many.

A sample is bad if the shard index or a photo's first bytes say so (a GIF, too many pixels), if a component cannot be
parsed, or if DALI or Pillow cannot decode it. ``on_error="raise"`` names it and stops; ``"substitute"`` lists it and
replaces it with another sample.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

from dali_pipes.errors import DecodeError, printable
from dali_pipes.formats.quarantine import CAUSE_CHARS, Quarantine
from dali_pipes.options import BadSamples
from dali_pipes.reader.batch import NUM_NAMED, Batch

_log = logging.getLogger(__name__)


class BadSample(NamedTuple):
    """A sample that cannot be read or decoded."""

    shard: str
    key: str
    component: str
    """The component at fault; empty if that is not known."""
    cause: str

    def __str__(self) -> str:
        shard, key, component = (printable(name) for name in (self.shard, self.key, self.component))
        where = f"component '{component}' " if component else ""
        return f"shard '{shard}', key '{key}': {where}{printable(self.cause, max_chars=CAUSE_CHARS)}"


class BadSamplesSeen:
    """The bad samples that one loader has seen; each is counted, logged and listed once."""

    def __init__(self, policy: BadSamples, *, quarantine: Quarantine | None) -> None:
        self._policy, self._quarantine = policy, quarantine
        self.seen: dict[int, BadSample] = {}
        """The bad samples of this rank's batches by ordinal, in the order in which they were seen."""
        self.unfit: set[int] = set()
        """Other ordinals that were tried in the place of bad samples, or came where they do not count, and are bad as
        well. They are other ranks' samples, or come to this rank in another batch, and count there."""

    def positions(self, batch: Batch) -> list[int]:
        """Find the positions in a batch of samples that are known to be bad."""
        if not self.seen and not self.unfit:
            return []
        known = (self.seen, self.seen.keys() | self.unfit)
        return [at for at, ordinal in enumerate(batch.ordinals.tolist()) if ordinal in known[at >= batch.num_valid]]

    def add(self, batch: Batch, problems: Mapping[int, tuple[str, str]]) -> None:
        """Add the bad samples of a batch; ``problems``: position in the batch -> the component at fault, and why.

        A sample counts, and is listed, if it is the batch's own: neither one that replaces another, nor one that only
        fills the batch.

        Raises:
            DecodeError: If bad samples must not be substituted, or there are too many now; names them.
            StoreError: If the quarantine file cannot be written.
        """
        found: dict[int, BadSample] = {}
        for position, (component, cause) in sorted(problems.items()):
            shard, key = batch.name(position)
            found.setdefault(int(batch.ordinals[position]), BadSample(shard, key, component, cause))
        if self._policy.on_error == "raise":
            first, *others = found.values()
            names = ", ".join(f"'{printable(other.key)}'" for other in others[:NUM_NAMED])
            more = f"; bad in this batch as well: {names}{', ...' if len(others) > NUM_NAMED else ''}" if others else ""
            raise DecodeError(
                f"{first}{more}; leave it out (select=Select(exclude=...)), or replace bad samples by others "
                "(bad_samples=BadSamples(on_error='substitute'))"
            )
        own = {int(batch.ordinals[at]) for at in problems if at < batch.num_valid and at not in batch.substituted}
        self.unfit.update(found.keys() - own)
        new = {ordinal: bad for ordinal, bad in found.items() if ordinal in own and ordinal not in self.seen}
        for ordinal, bad in new.items():
            if self._quarantine is not None:
                self._quarantine.add(*bad)  # first: after an error the batch is tried again
            self.seen[ordinal] = bad
            _log.warning("bad sample, another one replaces it: %s", bad)
        if new and len(self.seen) > self._policy.max_bad:
            where = f", all in '{self._quarantine.path}'" if self._quarantine is not None else ""
            last = list(self.seen.values())[-1]
            raise DecodeError(
                f"{len(self.seen)} samples are bad, max_bad={self._policy.max_bad} are allowed{where}; the last: "
                f"{last}; look at the data, leave them out (select=Select(exclude=...)), or raise max_bad"
            )
