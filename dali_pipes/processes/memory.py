"""Measure the resident memory of this process, by kind.

``RSS``, which ``top`` shows, is the sum of the three kinds. The bytes of cache files are in none of them, since no
loader maps a cache file; a control group counts a cache in /dev/shm all the same.
"""

from dataclasses import dataclass
from pathlib import Path

_FIELDS = {"RssAnon": "own_bytes", "RssFile": "file_bytes", "RssShmem": "shared_bytes"}


@dataclass(frozen=True, kw_only=True)
class ResidentMemory:
    """Bytes of this process's pages that are in memory now."""

    own_bytes: int
    """Pages of no file: what the process has allocated. Only forked children share them."""
    file_bytes: int
    """Pages of files that are mapped, libraries above all. The kernel can drop them, and shares them."""
    shared_bytes: int
    """Pages of shared memory that are mapped: the cache's tables, and blocks that worker processes share."""

    @classmethod
    def now(cls) -> "ResidentMemory":
        """Read ``/proc/self/status``; a kernel that does not tell the kinds apart gives zeros."""
        found = dict.fromkeys(_FIELDS.values(), 0)
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in _FIELDS:
                found[_FIELDS[name]] = int(rest.split()[0]) * 1024
        return cls(**found)
