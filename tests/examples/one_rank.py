"""A training as one of several ranks that are processes of a pool: quicker to start than what torchrun starts."""

import importlib
import os
from pathlib import Path


def train_rank(program: str, arguments: list[str], run: Path, rank: int, world_size: int, port: int) -> int:
    """The program's exit code. ``run`` has the number of this process as ``RANK.pid`` from the start on."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    run.mkdir(exist_ok=True)
    (run / f"{rank}.pid").write_text(str(os.getpid()))
    return int(importlib.import_module(program).main(arguments))
