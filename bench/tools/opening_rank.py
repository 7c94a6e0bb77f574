"""One rank that opens a loader of a simulated bucket, in a process of its own, step by step as its parent says.

It reads the settings as one line of JSON, does a step for each further line, and answers each with a line of JSON:
``import``, ``open``, ``weigh`` (when all ranks are open), ``read``.
"""

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STEPS = ("import", "open", "weigh", "read")
MIB = 1 << 20


def main() -> int:
    """Do the steps until the input ends."""
    settings = json.loads(sys.stdin.readline())
    opened = None
    for line in sys.stdin:
        step = line.strip()
        started, cpu_s = time.perf_counter(), time.process_time()
        if step == "import":
            import nvidia.dali.plugin.pytorch  # noqa: F401 (all that a training script has imported)

            import dali_pipes.opening.loader  # noqa: F401
        elif step == "open":
            opened = _open(settings)
        elif step == "read":
            for _ in itertools.islice(opened or (), settings["num_batches"]):
                pass
        answer = {"s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu_s, **_memory()}
        print(json.dumps(answer), flush=True)
    return 0


def _open(settings: dict[str, Any]) -> Any:
    import dali_pipes as dp

    return dp.loader(
        settings["url"],
        dp.classification_eval(resize=16, crop=16),
        batch_size=64,
        seed=7,
        shuffle=dp.Shuffle(window_bytes=settings["window_bytes"]),
        cache=dp.Cache(directory=settings["cache"], show_progress=False),
        rank=settings["rank"],
        world_size=settings["world_size"],
        device="cpu",
        endpoint=settings["endpoint"],
    )


def _memory() -> dict[str, float]:
    """MiB of this process: resident now and at most, its own pages, and its share of all (PSS)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    shares = dict(
        line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:] if ":" in line
    )
    named = {"rss_mib": status["VmRSS"], "peak_rss_mib": status["VmHWM"], "own_mib": status["RssAnon"]}
    return {name: int(text.split()[0]) / 1024 for name, text in (named | {"pss_mib": shares["Pss"]}).items()}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
