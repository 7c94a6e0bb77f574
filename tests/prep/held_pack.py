"""Pack on Ray, and wait in the middle of the second shard: a program of its own, because a test presses Ctrl-C."""

import sys
from pathlib import Path

from prep.pack import target as target_module
from tests.prep.shuffle.gated_store import GatedStore
from tests.shards import make_source, pack


def main(target: str, gate: str) -> None:
    target_module.MIN_SHARED_BYTES = 0
    store = GatedStore(Path(target), held="samples-000001.tar", gate=Path(gate))
    pack(make_source(43), store=store, max_count=10, on="ray")


if __name__ == "__main__":
    main(*sys.argv[1:])
