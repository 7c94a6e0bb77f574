"""A loader's epochs: the inputs of their plans, their feeds, and the position in the current epoch; the loader's parts.

At most three segments are open at a time: the one that is read, the one opened ahead, and the next epoch's first.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from dali_pipes.bad_samples import BadSamplesSeen, Repair
from dali_pipes.cache.share import CacheShare
from dali_pipes.errors import DecodeError
from dali_pipes.fetch.stager import Stager
from dali_pipes.graph.decode import BatchInputs, DecodePipeline
from dali_pipes.metrics.counts import Counts, report_span
from dali_pipes.order.plan import Batching
from dali_pipes.order.state import PlanInputs
from dali_pipes.reader.batch import Batch
from dali_pipes.reader.feed import Feed

_log = logging.getLogger(__name__)


class Epoch:
    """One epoch and the position in it; its methods are the events of an epoch.

    It begins at position ``start`` of its order, which is greater than 0 only after a resume. Between `ask` and
    `deliver` or `lose` it counts as cut short: if the loop is left there, by Ctrl-C for instance, DALI may have taken a
    part of a batch's inputs, and the decode pipeline must be built anew.
    """

    def __init__(self, feed: Feed, *, start: int, batching: Batching) -> None:
        self.feed, self.start = feed, start
        self.number: int = feed.epoch
        self.num_samples: int = feed.plan.num_samples
        self.delivered = 0
        """Batches since ``start`` that were delivered or lost."""
        self.num_lost = 0
        """The last of these, which were lost with an error: the loop has not yet had a batch after them."""
        self._batching = batching
        self.num_batches = feed.plan.num_steps(batching, start=start)
        """Batches from ``start`` on."""
        self.has_seen_end = False  # the loop, by StopIteration
        self.is_cut_short = False
        self.is_running = False
        """Whether a batch was asked for: decoded batches may be in flight."""
        self.error: Exception | None = None
        """Why the feed cannot give its next batch; it is raised when the batches before it are delivered."""
        self._begun_at: float | None = None  # when the first batch was asked for, until the end
        # No batch is left, and the loop has not yet seen the epoch's end: the last batch was lost, or a resumed loop
        # had delivered it already.
        self._owes_end = self.num_batches == 0

    @property
    def position(self) -> int:
        """Samples of the epoch up to the last delivered batch, on all ranks together."""
        return self._position(self.delivered - self.num_lost)

    @property
    def next_position(self) -> int:
        """The position of the next batch: lost batches lie before it."""
        return self._position(self.delivered)

    def _position(self, num_batches: int) -> int:
        return self.feed.plan.position(num_batches, self._batching, start=self.start)

    @property
    def num_batches_left(self) -> int:
        return self.num_batches - self.delivered

    @property
    def is_over(self) -> bool:
        return self.delivered == self.num_batches

    @property
    def has_ended(self) -> bool:
        """Whether no batch is left, and the loop has seen the end."""
        return self.is_over and not self._owes_end

    def stands_at(self, epoch: int, start: int) -> bool:
        """Whether this is the given epoch at the given position, and no batch was asked for."""
        is_touched = self.is_running or self.is_cut_short
        return not is_touched and (self.number, self.start) == (epoch, start)

    def end(self) -> None:
        self._owes_end, self.num_lost, self.has_seen_end = False, 0, True
        begun_at, self._begun_at = self._begun_at, None
        if begun_at is not None:
            report_span("epoch", seconds=time.perf_counter() - begun_at, epoch=self.number, start=self.start)

    def ask(self) -> None:
        if not self.is_running:
            self._begun_at = time.perf_counter()
        self.is_running = self.is_cut_short = True

    def deliver(self) -> None:
        # See Note [counted last].
        self.delivered, self.num_lost, self.is_cut_short = self.delivered + 1, 0, False

    def lose(self) -> None:
        """Note that the batch cannot be delivered; the next ones can."""
        num_lost = self.num_lost + 1
        self.deliver()
        self.num_lost, self._owes_end = num_lost, self.is_over

    def take_error(self) -> Exception:
        """Return the feed's error, to be raised now. The epoch stays cut short: a new feed reads the same batch again
        or, if it has a bad sample, the one after it.
        """
        error, self.error = self.error, None
        assert error is not None, "the plan has as many steps as len() says"
        if isinstance(error, DecodeError):
            self.lose()
            self.is_cut_short = True
        return error


class LoaderEpochs:
    """The current epoch of a loader, and the feed of the next one, which is opened ahead of time.

    ``open_feed(plan, start=)`` opens a feed, which stages its shards from then on.
    """

    current: Epoch  # `begin` sets it

    def __init__(
        self,
        inputs: PlanInputs,
        *,
        batching: Batching,
        share: CacheShare,
        counts: Counts,
        open_feed: Callable[..., Feed],
    ) -> None:
        self._inputs, self._batching, self._share, self._counts = inputs, batching, share, counts
        self._open_feed = open_feed
        self._is_windowed = share.reserved < int(share.extent_bytes.sum())
        self.ahead: Feed | None = None

    def begin(self, epoch: int, *, start: int = 0) -> None:
        """Begin an epoch at position ``start`` of its order."""
        plan = self._inputs.plan(epoch) if start else None
        if plan is not None and not plan.num_steps(self._batching, start=start):
            # The epoch is over: none of its samples is read or staged, because the start of the next one comes next.
            self._close_ahead(unless=epoch + 1)
            feed = self._open(epoch, start=plan.num_samples)
            self._prepare(epoch + 1, with_reader=False)
        else:
            self._close_ahead(unless=None if start else epoch)
            feed, self.ahead = self.ahead or self._open(epoch, start=start), None
        self.current = Epoch(feed, start=start, batching=self._batching)

    def begin_again(self) -> None:
        """Begin again the epoch that was cut short, with the batch after the last delivered one."""
        cut = self.current
        begun = Epoch(self._open(cut.number, start=cut.next_position), start=cut.start, batching=self._batching)
        begun.delivered, begun.num_lost = cut.delivered, cut.num_lost
        self.current = begun

    def next_inputs(self, complete: Callable[[Batch, Mapping[str, Any]], BatchInputs]) -> BatchInputs | None:
        """Read the next batch, and ``complete`` its inputs; ``None`` at the end, and after an error, which is kept."""
        epoch = self.current
        if epoch.error is not None:
            return None  # DALI asks for all inputs of an iteration, also if the first one said that the epoch is over
        try:
            with self._counts.read:
                read = epoch.feed.next()
            return None if read is None else complete(*read)
        except Exception as exc:  # noqa: BLE001 (raised when all batches before it are delivered)
            epoch.error = exc
            return None

    def _prepare(self, epoch: int, *, with_reader: bool = True) -> None:
        """Open the feed of the next epoch, and its reader if the shards are resident; errors come when it starts."""
        try:
            if self.ahead is None:
                self.ahead = self._open(epoch, start=0)
            if with_reader:
                with self._counts.read:
                    self.ahead.prepare()
        except Exception:  # noqa: BLE001 (raised again when that epoch is started)
            _log.debug("the next epoch could not be prepared", exc_info=True)
            self._close_ahead()

    def prepare_next(self, *, is_read: bool) -> None:
        """Prepare the next epoch; open its reader when all batches of the current one are read."""
        current = self.current
        if is_read:
            self._prepare(current.number + 1)
        elif self._is_windowed and current.feed.has_staged_all:
            # The next epoch's first windows are staged while this epoch's last ones are read.
            self._prepare(current.number + 1, with_reader=False)

    def close(self) -> None:
        """Close all feeds. Can be called twice."""
        self.current.feed.close()
        self._close_ahead()

    def _close_ahead(self, *, unless: int | None = None) -> None:
        if self.ahead is not None and self.ahead.epoch != unless:
            self.ahead.close()
            self.ahead = None

    def _open(self, epoch: int, *, start: int) -> Feed:
        share = self._share
        with self._counts.read:
            plan = self._inputs.plan(epoch)
            needed = plan.bytes_at_a_time(share.extent_bytes, self._batching)
            if needed > share.reserved:
                share.reserve_more(needed)
            return self._open_feed(plan, start=start)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoaderParts:
    """The parts of an open loader, which `dali_pipes.opening` has made."""

    source: str
    """The origin of the shards in one line: URLs and ETL."""
    classes: dict[int, str]
    inputs: PlanInputs
    batching: Batching
    epochs: LoaderEpochs
    decode: DecodePipeline
    share: CacheShare
    stager: Stager
    seen: BadSamplesSeen
    repair: Repair
    counts: Counts
