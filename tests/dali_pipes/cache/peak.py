"""The most space that cache files take while a test runs."""

import threading
import time
from pathlib import Path

from dali_pipes.cache.files import cache_root


class Peak:
    """The most bytes of blocks that the cache files in a directory had while a block of code ran."""

    def __init__(self, cache_dir: Path) -> None:
        self.num_bytes, self._root, self._over = 0, cache_root(cache_dir), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            # Between the two looks one cache file may free blocks that another takes: both must find the same.
            found = self._blocks()
            if found == self._blocks():
                self.num_bytes = max(self.num_bytes, sum(found.values()))
            time.sleep(0.0005)

    def _blocks(self) -> dict[Path, int]:
        return {path: path.stat().st_blocks * 512 for path in self._root.glob("*.image")}

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
