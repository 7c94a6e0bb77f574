"""Make memory ready to be timed: pages that a virtual machine's host has not backed cost up to ten times the others."""

import numpy as np
import psutil

__all__ = ["touch_memory"]

PAGE = 4096
BLOCK_BYTES = 256 << 20


def touch_memory(num_bytes: int) -> int:
    """Use so much memory once and give it back, so that what is timed next meets pages that the host has backed.

    # Note [cold memory]: a guest of a host that takes free pages back (free page reporting: two seconds after they were
    # freed) pays for each page as if it were the first use: 2.3 s of system time a GiB where 0.35 s is usual, seen on
    # such a machine. So it is done just before the clock starts, in the process that is timed.

    Args:
        num_bytes: What is about to be stored or received; at most half of the available memory is touched.

    Returns:
        Bytes that were touched.
    """
    num_bytes = min(num_bytes, psutil.virtual_memory().available // 2)
    # All at once: a block that is given back would be given again.
    blocks = [np.empty(min(BLOCK_BYTES, num_bytes - start), np.uint8) for start in range(0, num_bytes, BLOCK_BYTES)]
    for block in blocks:
        block[::PAGE] = 1
    return num_bytes
