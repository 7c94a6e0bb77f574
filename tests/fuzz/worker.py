"""A process that gives mutants to one target until it is told to stop; it may crash or hang.

It is started as ``python -m tests.fuzz.worker TARGET SEED FOLDER``. In FOLDER it leaves each input before it is checked
(``input``), the counts so far (``counts``), and what it found (``finding``). It stops at a file ``stop``.
"""

import collections
import json
import os
import sys
import time
from pathlib import Path
from random import Random

from tests.fuzz.mutations import mutant
from tests.fuzz.targets.all import BROKEN, TARGETS

# Counts are written this often: the parent takes a worker whose counts stand still for hung.
COUNT_S = 0.5
# A worker does not stop before this many mutants, however slow the machine is: some are taken, some refused.
MIN_MUTANTS = 50


def main() -> int:
    name, seed, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    target = (TARGETS | BROKEN)[name]()
    counts: collections.Counter[str] = collections.Counter()
    current = os.open(folder / "input", os.O_RDWR | os.O_CREAT, 0o600)

    def check(data: bytes) -> str:
        os.pwrite(current, data, 0)
        os.ftruncate(current, len(data))
        return target.check(data)

    def write_counts() -> None:
        (folder / "counts.new").write_text(json.dumps(counts))
        (folder / "counts.new").replace(folder / "counts")

    try:
        seeds = target.seeds()
        for data in seeds:
            if (found := check(data)) != "taken":
                raise AssertionError(f"a seed is {found}")
        seeds = [*seeds, *target.strangers()]
        write_counts()  # the time begins
        draw, counted_at = Random(seed), time.monotonic()
        while True:
            counts[check(mutant(draw, seeds))] += 1
            if time.monotonic() - counted_at > COUNT_S:
                counted_at = time.monotonic()
                write_counts()
                if (folder / "stop").exists() and counts.total() >= MIN_MUTANTS:
                    return 0
    except Exception as exc:
        (folder / "finding").write_text(f"{type(exc).__name__}: {exc}")
        raise
    finally:
        write_counts()
        target.close()


if __name__ == "__main__":
    sys.exit(main())
