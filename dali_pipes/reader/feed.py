"""Say which samples a rank's batches take, and read one epoch's batches of encoded bytes, segment by segment.

There are two readers. `dali_pipes.reader.aio_reader` reads a batch with one system call into memory that is used again.
`dali_pipes.reader.webdataset` runs DALI's `fn.readers.webdataset`. `dali_pipes.reader.aio_reader.open_reader` chooses.
The first segment may come from the store by range instead (`dali_pipes.reader.ranged`), and so may the segments after
it while their shards come slowly.

Windows are staged as far ahead as the cache may hold them, and given up when their last segment is closed. The step in
which a window ends is a segment of its own: only this step names shards of two windows.

The next segment is opened while the batches of this one are decoded, if its shards are resident. To open it only when
its first batch is needed would add some 5 ms each time. For the same reason the loader prepares the next epoch's feed
before this epoch's last batches are delivered.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dali_pipes.arrays import Int64s
from dali_pipes.cache.share import CacheShare
from dali_pipes.errors import DataError, StoreError
from dali_pipes.fetch.demand import LongWaits
from dali_pipes.fetch.stager import Stager
from dali_pipes.metrics.counts import Counts
from dali_pipes.order.plan import Batching, Plan, Step
from dali_pipes.order.randomness import Stream
from dali_pipes.progress import bar
from dali_pipes.reader.batch import Batch, Rows
from dali_pipes.reader.buffers import HUGE_PAGE
from dali_pipes.reader.ranged import MAX_RANGED_BYTES, RANGED_SHARE, RangedReader, RangedSegment
from dali_pipes.reader.samples import Samples
from dali_pipes.store.patience import pause


class Lines(NamedTuple):
    """The places of a segment's samples in the cache file; one line a sample, in the order of the batches."""

    ordinals: Int64s
    """int64 [N]."""
    starts: Sequence[Int64s]
    """For each component, int64 [N]: the first byte of each sample's."""
    sizes: Sequence[Int64s]
    """For each component, int64 [N]: bytes; 0 where a sample lacks the component."""


class Segment(Protocol):
    """Some lines that are read in batches, in order."""

    def read(self) -> Sequence[Any]:
        """Read the next batch: for each component a TensorListCPU or an `EncodedBatch` of uint8 arrays [bytes]."""

    def close(self) -> None:
        """Wait until nothing is read any more. Can be called twice. Batches that were read stay as they are."""


class SegmentReader(Protocol):
    """Opens the segments of one loader; `close` frees what they share, after they are closed."""

    def open(self, lines: Lines, *, batch_size: int) -> Segment:
        """Open a segment, and begin to read its first batch. ``batch_size`` divides the number of lines."""

    def close(self) -> None: ...


_log = logging.getLogger(__name__)

# A segment's rows are computed at once, in the thread that iterates: 1 us a line.
MAX_LINES = 8192
# If shards must still be staged, the first segment is one batch, so that it waits for its own shards only. Each further
# segment is longer by this factor, up to MAX_LINES.
SEGMENT_GROWTH = 4
# Batches, or samples of small batches, whose bytes are requested from the disk before they are read, if the cache file
# is on a disk.
READ_AHEAD_BATCHES = 8
READ_AHEAD_SAMPLES = 512
# While the first window is staged, a progress bar appears after this time.
SHOW_AFTER_S = 0.5
# While the first batch is read by range, nothing else is fetched for so long. A near store answers within this time,
# and then the cores decode the batch. A far store does not, and the cores are idle: then shards are fetched, too.
ALONE_S = 0.3
# A later segment is read by range if, so long after its turn has come, two thirds of its missing bytes are still
# missing: the shards will take a second more. Else its requests would only cost the shards their processor time.
GRACE_S = 0.5
POLL_S = 0.005


class _Opened(NamedTuple):
    segment: Segment
    steps: list[Step]
    rows: Rows
    lines: Lines
    shards: list[int]
    """Those that it needs in the cache."""


class Feed:
    """One epoch of one rank, read from position ``start`` of its order on; owns at most two open segments.

    ``components`` are named as the graph names them. ``start`` is a multiple of the global batch size.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        samples: Samples,
        components: Sequence[str],
        share: CacheShare,
        stager: Stager,
        reader: SegmentReader,
        by_range: RangedReader | None,
        counts: Counts,
        batching: Batching,
        start: int = 0,
        show_progress: bool = False,
    ) -> None:
        self.plan = plan
        self._samples, self._components, self._share, self._stager = samples, components, share, stager
        self._reader, self._by_range, self._counts = reader, by_range, counts
        self._show_progress = show_progress
        self._long_waits = LongWaits(stager.progress)
        self._streams: dict[str, Stream] = {}
        # For each lane: the windows that are still to be staged, and those that are staged, by number.
        lanes = plan.lanes_of(batching)
        self._coming = {lane: plan.windows_ahead(lane, start=start) for lane in lanes}
        self._staged: dict[int, deque[tuple[int, list[int]]]] = {lane: deque() for lane in lanes}
        self._ahead: _Opened | None = None
        self._open: _Opened | None = None
        self._num_read = 0  # batches that were read of the open segment
        self._is_faulty = False  # whether a segment could not be opened ahead
        self._is_first = True  # whether no batch has been read yet
        self._ranged: RangedSegment | None = None  # reads the next segment by range
        self._has_chosen = False  # whether to read the next segment by range or not
        self._turn: tuple[float, int] | None = None  # when the next segment's turn came, and its missing bytes then
        self._num_ranged_bytes = 0
        steps = plan.steps(batching, start=start)
        first_steps = list(itertools.islice(steps, 1))
        first_shards = self._shards(first_steps) if first_steps else []
        self.is_by_range = bool(first_steps) and self._is_small(first_steps, first_shards)
        """Whether the first batch is read by range. Until the second one is asked for, nothing else is fetched, but for
        `ALONE_S` at most."""
        if self.is_by_range:
            stager.pause(ALONE_S)
        # The first batch's shards are fetched before the rest of the window; otherwise all fetchers could be busy with
        # other shards when these are needed.
        self._stage_ahead(first=first_shards)
        first = [shard for staged in self._staged.values() for _, window in staged for shard in window]
        first_lines = batching.batch_size if stager.num_missing(first)[0] else MAX_LINES
        done = plan.finished_at(start)
        finished = tuple(done[lane] for lane in lanes)
        self._runs = _cut(itertools.chain(first_steps, steps), first_lines=first_lines, lanes=lanes, finished=finished)
        self._run = next(self._runs, None)  # the steps of the next segment

    @property
    def epoch(self) -> int:
        return self.plan.order.epoch

    @property
    def has_staged_all(self) -> bool:
        """Whether all windows of the epoch are staged or handed to the stager."""
        return not self._coming

    def prepare(self) -> None:
        """Open the next segment now, if none is open ahead: if its shards are resident; else begin to read it by range.

        An error is not raised here: `next` raises it, after the batches before it.
        """
        if self._ahead is not None or self._run is None or self._is_faulty:
            return
        shards = self._shards(self._run)
        self._begin_ranged(self._run, shards)
        if self._stager.need_resident(shards):
            try:
                self._ahead = self._open_segment(self._run, shards)
            except Exception:  # noqa: BLE001 (raised again when the segment is needed)
                self._is_faulty = True
                _log.debug("the next segment could not be opened ahead", exc_info=True)

    def is_ready(self) -> bool:
        """Whether `next` would return at once."""
        if self._open is not None and self._num_read < len(self._open.steps):
            return True
        with self._counts.read:
            self.prepare()
        is_there = self._ranged is not None and self._ranged.rows is not None
        return self._ahead is not None or self._run is None or self._is_faulty or is_there

    def example(self) -> Rows | None:
        """The first batch's samples, if it is read by range and their indexes come; several are read at a time."""
        if not self.is_by_range or self._by_range is None or self._run is None:
            return None
        try:
            return self._by_range.load(self._run[0].ordinals)
        except (DataError, StoreError):
            _log.debug("the indexes of the first batch could not be read", exc_info=True)
            return None

    def next(self) -> tuple[Batch, dict[str, Any]] | None:
        """Read the next batch: its rows, and the encoded bytes by component, see `Segment.read`; ``None`` at the end.

        Raises:
            CacheError, DataError, StoreError: If a shard of the batch could not be staged.
        """
        # This is not a generator: its cleanup could run in any thread, and would wait for the cache's mutex there.
        if self._open is not None:
            self.prepare()
            if self._num_read == len(self._open.steps):
                finished = self._open.steps[-1].finished
                self._close_segment(self._open)
                self._open = None
                for lane, staged in self._staged.items():
                    while staged and staged[0][0] < finished[lane]:
                        self._give_up(staged.popleft()[1])
                self._stage_ahead()
        if self._open is None:
            if self._ahead is None and self._run is not None:
                shards = self._shards(self._run)
                if not self._is_first:
                    self._stager.resume()
                self._begin_ranged(self._run, shards)
                with self._counts.shard_wait:
                    ranged = self._wait_ranged(self._run, shards)
                    if ranged is None:
                        self._wait(shards)
                self._ahead = self._open_segment(self._run, shards, ranged)
            self._open, self._ahead, self._num_read, self._is_first = self._ahead, None, 0, False
            if self._open is None:
                return None
        opened, number = self._open, self._num_read
        step, start = opened.steps[number], number * len(opened.steps[0].ordinals)
        with self._counts.read_wait:
            encoded = dict(zip(self._components, opened.segment.read(), strict=True))
        stop = start + len(step.ordinals)
        self._counts.read_bytes += sum(int(column[start:stop].sum()) for column in opened.lines.sizes)
        if opened.shards:
            ahead = _num_ahead(len(step.ordinals))
            self._read_ahead(opened.lines, slice(start + ahead, stop + ahead))
        self._num_read += 1
        rows, valid = opened.rows, step.num_valid
        made = Batch(rows, start, stop, step.occurrences, num_valid=valid, stream=self._stream, shape=step.shape)
        return made, encoded

    def close(self) -> None:
        """Close the segments and release the shards. Can be called twice."""
        self._run = None
        self._end_ranged()
        if self._open is not None:
            self._close_segment(self._open)
            self._open = None
        if self._ahead is not None:
            self._close_segment(self._ahead)
            self._ahead = None
        for staged in self._staged.values():
            while staged:
                self._give_up(staged.popleft()[1])
        self._coming.clear()

    def _wait(self, shards: list[int]) -> None:
        num_missing, num_bytes = self._stager.num_missing(shards)
        watch = self._long_waits.watch(shards)
        if not num_missing or not self._show_progress:
            self._stager.need(shards, urgent=self._is_first, waiting=watch)
            return
        self._show_progress = False  # once a loader
        with bar(what=f"stage {num_missing} shards", total=num_bytes, unit="B", delay_s=SHOW_AFTER_S) as drawn:

            def show(num_bytes_left: int) -> None:
                drawn.update(num_bytes - num_bytes_left - drawn.n)
                watch(num_bytes_left)

            self._stager.need(shards, urgent=self._is_first, waiting=show)

    # The next segment by range

    def _is_small(self, run: list[Step], shards: list[int]) -> bool:
        """Whether the samples of a segment are a small part of its missing shards."""
        manifest, missing = self._samples.manifest, self._share.not_there(shards)
        if self._by_range is None or not len(missing):
            return False
        means = manifest.shard_bytes / np.maximum(manifest.samples, 1)
        num_bytes = sum(float(means[self._samples.shard_of(step.ordinals)].sum()) for step in run)
        num_bytes += int(manifest.index_bytes[missing].sum())
        in_memory = max(num_bytes, len(run) * HUGE_PAGE)
        is_allowed = self._num_ranged_bytes + in_memory <= MAX_RANGED_BYTES
        return is_allowed and num_bytes * RANGED_SHARE < int(self._share.extent_bytes[missing].sum())

    def _begin_ranged(self, run: list[Step], shards: list[int]) -> None:
        """Choose whether to read the next segment by range, and begin; a later segment's choice may take several calls.

        Its shards may come soon: see `GRACE_S`.
        """
        if self._has_chosen or not (self._is_first or self._stager.is_fetching_ahead):
            return
        num_bytes = self._stager.num_missing(shards)[1]
        if self._turn is None:
            self._turn = time.monotonic(), num_bytes
        is_small = self._is_small(run, shards)
        if is_small and not self._is_first and time.monotonic() - self._turn[0] < GRACE_S:
            return
        self._has_chosen = True
        comes_soon = not self._is_first and 3 * num_bytes < 2 * self._turn[1]
        if self._by_range is None or not is_small or comes_soon:
            self._stager.resume()
            return
        ordinals = np.concatenate([step.ordinals for step in run])
        batch_size = len(run[0].ordinals)
        self._ranged = self._by_range.open(ordinals, batch_size=batch_size)

    def _wait_ranged(self, run: list[Step], shards: list[int]) -> RangedSegment | None:
        """Wait for the segment that is read by range; ``None``: there is none, it failed, or the shards came first."""
        watch = self._long_waits.watch(shards)
        while self._stager.num_missing(shards)[0]:
            if (ranged := self._ranged) is None:
                if self._has_chosen:
                    break
                pause(POLL_S)
                self._begin_ranged(run, shards)
            elif ranged.over.wait(POLL_S):
                if ranged.rows is None:
                    break
                self._ranged = None
                return ranged
            watch(0)
        self._end_ranged()
        return None

    def _end_ranged(self) -> None:
        if self._ranged is not None:
            self._ranged.close()
            self._ranged = None
        self._stager.resume()

    # The next segment in the cache

    def _open_segment(self, run: list[Step], shards: list[int], ranged: RangedSegment | None = None) -> _Opened:
        ordinals = np.concatenate([step.ordinals for step in run])
        if ranged is not None:
            assert ranged.rows is not None, "all was read"
            sizes = [ranged.rows.places(component).size for component in self._components]
            self._num_ranged_bytes += sum(int(column.sum()) for column in sizes)
            self._advance()
            return _Opened(ranged, run, ranged.rows, Lines(ordinals, [], sizes), [])
        try:
            rows = self._samples.rows(ordinals)
            extents = self._share.starts[rows.shard]
            places = [rows.places(component) for component in self._components]
            # A sample that lacks the component has an offset of -1 and no bytes.
            starts = [extents + np.maximum(place.offset, 0) for place in places]
            lines = Lines(ordinals, starts, [place.size for place in places])
            batch_size = len(run[0].ordinals)
            self._read_ahead(lines, slice(0, _num_ahead(batch_size)))  # the reader begins when it is opened
            segment = self._reader.open(lines, batch_size=batch_size)
        except BaseException:
            self._stager.done(shards)
            raise
        self._end_ranged()
        self._advance()
        return _Opened(segment=segment, steps=run, rows=rows, lines=lines, shards=shards)

    def _advance(self) -> None:
        self._has_chosen, self._turn, self._run = False, None, next(self._runs, None)

    def _close_segment(self, opened: _Opened) -> None:
        opened.segment.close()  # first: its reader may still read
        self._stager.done(opened.shards)
        self._forget(opened.shards)

    def _forget(self, shards: list[int]) -> None:
        # Indexes of shards in the next epoch's windows are kept. Shards that FILL repeats are in no window any more.
        self._samples.forget(shard for shard in shards if not self._stager.is_ahead(shard))

    def _give_up(self, window: list[int]) -> None:
        self._stager.unstage(window)
        self._forget(window)

    def _stage_ahead(self, *, first: Sequence[int] = ()) -> None:
        while self._coming and (self._stager.is_short or not all(self._staged[lane] for lane in self._coming)):
            # The lane with the fewest staged windows: one data set may be read many times as fast as another.
            lane = min(self._coming, key=lambda coming: len(self._staged[coming]))
            window = next(self._coming[lane], None)
            if window is None:
                del self._coming[lane]
                continue
            number, shards = window[0], window[1].tolist()
            self._staged[lane].append((number, shards))
            self._stager.stage(sorted(shards, key=lambda shard: shard not in first) if first else shards)

    def _read_ahead(self, lines: Lines, rows: slice) -> None:
        for starts, sizes in zip(lines.starts, lines.sizes, strict=True):
            self._share.read_ahead(starts[rows], sizes[rows])

    def _shards(self, run: list[Step]) -> list[int]:
        ordinals = np.concatenate([step.ordinals for step in run])
        return [int(shard) for shard in np.unique(self._samples.shard_of(ordinals))]

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            order = self.plan.order
            self._streams[name] = Stream(order.seed, order.epoch, f"graph/{name}")
        return self._streams[name]


def _num_ahead(batch_size: int) -> int:
    """Samples that are requested from the disk before they are read."""
    return max(READ_AHEAD_BATCHES * batch_size, READ_AHEAD_SAMPLES)


def _cut(
    steps: Iterator[Step], *, first_lines: int, lanes: Sequence[int], finished: tuple[int, ...]
) -> Iterator[list[Step]]:
    """Cut the epoch's steps into segments; the steps of a segment have one batch size, as a reader's batches do.

    ``first_lines`` is the largest number of lines in the first segment. ``finished`` is, for each lane, the number of
    windows that are read to their end before the first step.
    """
    limit = first_lines
    run: list[Step] = []
    for step in steps:
        before, finished = finished, tuple(step.finished[lane] for lane in lanes)
        # The step that ends a window may also name shards of the next window. It is a segment of its own, so that the
        # other steps do not wait for these shards: the cache may have no space for them before this window's end.
        ends = finished != before
        is_full = (len(run) + 1) * len(step.ordinals) > limit
        if run and (ends or is_full or len(step.ordinals) != len(run[0].ordinals)):
            yield run
            run, limit = [], min(SEGMENT_GROWTH * limit, MAX_LINES)
        run.append(step)
        if ends:
            yield run
            run = []
    if run:
        yield run
