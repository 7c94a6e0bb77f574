"""Look at a process's memory, and touch memory before it is timed."""

from pathlib import Path

import numpy as np
import psutil

PAGE = 4096
BLOCK_BYTES = 256 << 20


def status_mib(name: str) -> float:
    """A figure of ``/proc/self/status``, such as ``VmHWM``, the peak; of this process alone, in MiB.

    ``getrusage()`` would also count the memory that the parent once had.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def touch_memory(num_bytes: int) -> int:
    """Use this much memory once and give it back, so that the next measurement gets pages that the host has backed.

    # Note [cold memory]: some hosts take free pages back from a guest (free page reporting, two seconds after they were
    # freed). The guest then pays for each page as for its first use: 2.3 s of system time a GiB were seen, where 0.35 s
    # is usual. So touch the memory just before the clock starts, in the process that is timed.

    Args:
        num_bytes: Bytes that are about to be stored or received. At most half of the available memory is touched.

    Returns:
        Bytes that were touched.
    """
    num_bytes = min(num_bytes, psutil.virtual_memory().available // 2)
    # Allocate all blocks first: a block that is freed would be allocated again.
    blocks = [np.empty(min(BLOCK_BYTES, num_bytes - start), np.uint8) for start in range(0, num_bytes, BLOCK_BYTES)]
    for block in blocks:
        block[::PAGE] = 1
    return num_bytes
