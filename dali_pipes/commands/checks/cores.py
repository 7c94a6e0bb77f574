"""Check the cores: whether they suffice for the ranks of this host, and whether a rank's cores are on one NUMA node."""

import os
from collections.abc import Mapping, Set
from pathlib import Path

from dali_pipes.commands.checks.findings import Findings, counted, ok, warn
from dali_pipes.processes.ranks import cores_of_rank, num_local_ranks

NODES = Path("/sys/devices/system/node")
GPUS = Path("/proc/driver/nvidia/gpus")
# One that decodes, and one for the step and the loader's own work.
MIN_CORES = 2


def check_cores(environment: Mapping[str, str], *, nodes: Path = NODES, gpus: Path = GPUS) -> Findings:
    """Compare the decoding threads of all ranks with the cores.

    The ranks are those that the launcher started on this host or, without a launcher, one for each GPU.
    """
    cores = os.sched_getaffinity(0)
    num_ranks = num_local_ranks(environment)
    if num_ranks > 1:
        threads, ranks = cores_of_rank(environment), f"{num_ranks} ranks of this job on this host"
    else:
        num_ranks = max(1, len(list(gpus.iterdir())) if gpus.is_dir() else 1)
        threads, ranks = max(1, len(cores) // num_ranks), f"{counted(num_ranks, 'rank')}, one for each GPU"
        ranks = ranks if gpus.is_dir() else "1 rank"
    used = [name for name, own in numa_nodes(nodes).items() if own & cores]
    found = (
        f"{counted(threads, 'decoding thread')} a rank by default, with {ranks}, {counted(len(cores), 'core')} and "
        f"{counted(len(used), 'NUMA node')}; on a GPU each decoder of the graph has as many threads again"
    )
    if threads < MIN_CORES and num_ranks > 1:
        yield warn(
            "cores", found, f"a rank needs {MIN_CORES} cores at least: start fewer ranks, or give the job more cores"
        )
    elif len(used) > 1 and num_ranks > 1:
        advice = (
            "bind each rank to the cores near its GPU (torchrun --numa-binding=exclusive): docs/dgx.md, 'Two sockets'"
        )
        yield warn("cores", f"{found}; this process is not bound to one of them", advice)
    else:
        yield ok("cores", found)


def numa_nodes(directory: Path = NODES) -> dict[str, Set[int]]:
    """Find the NUMA nodes of this machine -> the numbers of their cores; empty if the kernel does not tell."""
    return {path.parent.name: _numbers(path.read_text()) for path in sorted(directory.glob("node[0-9]*/cpulist"))}


def _numbers(text: str) -> Set[int]:
    """Read a list of cores as the kernel writes it.

    >>> sorted(_numbers("0-2,8"))
    [0, 1, 2, 8]
    """
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
