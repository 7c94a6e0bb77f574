"""A training as the Slurm script starts one, without the training: a step each 20 ms, a checkpoint after each.

Its cache is a file in --cache-dir, its state the number of steps in --out, and steps.txt there has a line a step: one
that is done twice or left out is seen.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    """Train to the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", required=True)
    parser.add_argument("--num-slices", type=int, required=True)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--deaf", action="store_true")
    arguments = parser.parse_args()
    assert os.environ["DALI_PIPES_CACHE"] == str(arguments.cache_dir)
    if arguments.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    out = arguments.out / os.environ["SLURM_PROCID"]
    out.mkdir(parents=True, exist_ok=True)
    (arguments.cache_dir / "image").write_bytes(bytes(4096))
    state = out / "state"
    step = int(state.read_text()) if state.exists() else 0
    while step < arguments.steps:
        if step == arguments.fail_at:
            return 3
        time.sleep(0.02)
        with (out / "steps.txt").open("a") as log:
            log.write(f"{step}\n")
        step += 1
        partial = out / "state.partial"
        partial.write_text(str(step))
        partial.replace(state)
    return 0


if __name__ == "__main__":
    sys.exit(main())
