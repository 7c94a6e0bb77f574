"""Keep account of shards that one thread fetches together: which of them are whole, and which have failed."""

from collections.abc import Sequence
from functools import partial

from dali_pipes.fetch.fetcher import Wanted


class ComingShards:
    """Shards that are being fetched. A shard is whole when each of its objects is. Belongs to one thread."""

    def __init__(self) -> None:
        self._missing: dict[int, set[str]] = {}
        self.whole: list[int] = []
        """Shards that became whole since `take_whole`."""
        self.errors: dict[int, Exception] = {}
        """The first error of each shard that failed."""

    def add(self, shard: int, objects: Sequence[Wanted]) -> list[Wanted]:
        """Add a shard; returns its objects, which will report here."""
        self._missing[shard] = {one.name for one in objects}
        return [one._replace(report=partial(self._report, shard, one.name)) for one in objects]

    def fail(self, shard: int, error: Exception) -> None:
        """Count a shard as failed."""
        self.errors.setdefault(shard, error)
        self._missing.pop(shard, None)

    @property
    def is_over(self) -> bool:
        """Whether every shard is whole or has failed."""
        return not self._missing

    def take_whole(self) -> list[int]:
        """Return ``whole``, and empty it."""
        whole, self.whole = self.whole, []
        return whole

    def _report(self, shard: int, name: str, error: Exception | None) -> None:
        if error is not None:
            self.fail(shard, error)
        elif shard in self._missing:
            self._missing[shard].discard(name)
            if not self._missing[shard]:
                del self._missing[shard]
                self.whole.append(shard)
