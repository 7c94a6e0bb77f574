"""Read an epoch: the plan's steps in, batches of encoded bytes out, one segment after the other.

The next segment is opened while the batches of this one are decoded, if its shards are resident: a reader made when its
first batch is wanted would be waited for, some 5 ms each time. For the same reason the loader prepares the next epoch's
feed before this epoch's last batches are delivered.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from dali_pipes.fetch import Stager
from dali_pipes.image import Image
from dali_pipes.plan import LastBatchPolicyName, Plan, Step
from dali_pipes.randomness import Stream
from dali_pipes.samples import Batch, Places, Samples
from dali_pipes.segments import MAX_LINES, Segment, index_text

__all__ = ["Feed"]

# Where shards are still to be staged, the first segment is one batch, so that it waits for the shards of no other; each
# next one is longer, up to MAX_LINES.
SEGMENT_GROWTH = 4


class Feed:
    """One epoch of one rank, read from position ``start`` of its order on; owns at most two open segments."""

    def __init__(
        self,
        plan: Plan,
        *,
        samples: Samples,
        places: Sequence[Places],
        image: Image,
        stager: Stager,
        batch_size: int,
        last_batch_policy: LastBatchPolicyName,
        start: int = 0,
    ) -> None:
        self.plan = plan
        self._samples, self._places, self._image, self._stager = samples, places, image, stager
        self._streams: dict[str, Stream] = {}
        shards = [int(shard) for window in plan.window_shards() for shard in window]
        first_lines = MAX_LINES if stager.is_ready(shards) else batch_size
        stager.stage(shards)
        steps = plan.steps(batch_size=batch_size, last_batch_policy=last_batch_policy, start=start)
        self._runs = _cut(steps, first_lines=first_lines)
        self._run = next(self._runs, None)  # the steps of the segment that is to be opened next
        self._ahead: tuple[Segment, list[Step]] | None = None
        self._batches = self._read()

    def prepare(self) -> None:
        """Open the next segment now, if all its shards are resident and none is open ahead."""
        if self._ahead is None and self._run is not None and self._stager.is_ready(self._shards(self._run)):
            self._ahead = self._open_segment(self._run)

    def next(self) -> tuple[Batch, Sequence[Any]] | None:
        """The next batch: its rows, and for each component a TensorList of its encoded bytes; ``None`` at the end.

        Raises:
            CacheError, DataError, StoreError: A shard of it could not be staged.
        """
        return next(self._batches, None)

    def close(self) -> None:
        """Close the segments. Can be called twice."""
        self._batches.close()
        if self._ahead is not None:
            self._ahead[0].close()
            self._ahead = None

    def _read(self) -> Generator[tuple[Batch, Sequence[Any]], None, None]:
        while (opened := self._take_segment()) is not None:
            segment, steps = opened
            with segment:
                for step in steps:
                    batch = Batch(
                        self._samples, step.ordinals, step.occurrences, num_valid=step.num_valid, stream=self._stream
                    )
                    yield batch, segment.read()
                    self.prepare()

    def _take_segment(self) -> tuple[Segment, list[Step]] | None:
        if self._ahead is None and self._run is not None:
            self._stager.wait(self._shards(self._run))
            self._ahead = self._open_segment(self._run)
        taken, self._ahead = self._ahead, None
        return taken

    def _open_segment(self, run: list[Step]) -> tuple[Segment, list[Step]]:
        ordinals = np.concatenate([step.ordinals for step in run])
        starts = self._image.starts[self._samples.shard[ordinals]]
        index = index_text(
            ordinals,
            [starts + places.offset[ordinals] for places in self._places],
            [places.size[ordinals] for places in self._places],
        )
        segment = Segment(self._image.path, index, num_components=len(self._places), batch_size=len(run[0].ordinals))
        self._run = next(self._runs, None)
        return segment, run

    def _shards(self, run: list[Step]) -> list[int]:
        ordinals = np.concatenate([step.ordinals for step in run])
        return [int(shard) for shard in np.unique(self._samples.shard[ordinals])]

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            order = self.plan.order
            self._streams[name] = Stream(order.seed, order.epoch, f"graph/{name}")
        return self._streams[name]


def _cut(steps: Iterator[Step], *, first_lines: int) -> Iterator[list[Step]]:
    """The steps of each segment. A short last batch is a segment of its own: a reader's batches are of one size."""
    limit = first_lines
    step = next(steps, None)
    while step is not None:
        size = len(step.ordinals)
        run = [step]
        while (step := next(steps, None)) is not None:
            if len(step.ordinals) != size or (len(run) + 1) * size > limit:
                break
            run.append(step)
        yield run
        limit = min(SEGMENT_GROWTH * limit, MAX_LINES)
