"""A process that gives mutants to one target; it may crash or hang.

It is started as ``python -m tests.fuzz.worker TARGET SEED FOLDER SECONDS``; without SECONDS it checks the target's
``num_daily`` mutants. It prints the counts so far. In FOLDER it leaves each input before it is checked (``input``), and
what it found: ``finding``, and ``files`` that were made of the input.
"""

import collections
import json
import os
import sys
import time
from pathlib import Path
from random import Random

from tests.fuzz.mutations import mutant
from tests.fuzz.target import BrokenPromiseError, watch
from tests.fuzz.targets.all import BROKEN, TARGETS

REPORT_S = 10.0


def main() -> int:
    name, seed, folder, seconds = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    counts: collections.Counter[str] = collections.Counter()
    current = os.open(folder / "input", os.O_RDWR | os.O_CREAT, 0o600)

    def check(data: bytes) -> str:
        os.pwrite(current, data, 0)
        os.ftruncate(current, len(data))
        return target.check(data)

    target = None
    try:
        watch()
        target = (TARGETS | BROKEN)[name]()
        seeds = target.seeds()
        for data in seeds:
            if (found := check(data)) != "taken":
                raise AssertionError(f"a seed is {found}")
        seeds = [*seeds, *target.strangers()]
        draw, begun_at, reported_at = Random(seed), time.monotonic(), time.monotonic()
        while counts.total() < target.num_daily if not seconds else time.monotonic() - begun_at < float(seconds):
            counts[check(mutant(draw, seeds))] += 1
            if time.monotonic() - reported_at > REPORT_S:
                watch()
                reported_at = time.monotonic()
                print(json.dumps(counts | {"seconds": reported_at - begun_at}), flush=True)
        return 0
    except BaseException as exc:  # a panic of a Rust library is no `Exception`
        (folder / "finding").write_text(f"{type(exc).__name__}: {exc}")
        if isinstance(exc, BrokenPromiseError):
            exc.keep_files(folder / "files")
        raise
    finally:
        if target is not None:
            print(json.dumps(counts | {"seconds": time.monotonic() - begun_at}), flush=True)
            target.close()


if __name__ == "__main__":
    sys.exit(main())
