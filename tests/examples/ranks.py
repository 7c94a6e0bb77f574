"""What each rank's process of a pool runs: quicker to start than what torchrun starts."""

import importlib
import os
from pathlib import Path

from tests.lazy import Lazy

torch = Lazy("torch")


def train_rank(program: str, arguments: list[str], run: Path, rank: int, world_size: int, port: int) -> int:
    """The program's exit code. ``run`` has the number of this process as ``RANK.pid`` from the start on."""
    values = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in values.items()}
    run.mkdir(exist_ok=True)
    (run / f"{rank}.pid").write_text(str(os.getpid()))
    return int(importlib.import_module(program).main(arguments))
