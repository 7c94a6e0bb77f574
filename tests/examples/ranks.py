"""What each rank's process of a pool runs: quicker to start than what torchrun starts."""

import importlib
import os
from pathlib import Path

from models import UNet
from processes import start_process

from tests.lazy import Lazy

torch = Lazy("torch")


def first_is_as_later(rank: int, world_size: int, port: int) -> bool:
    """Whether the averaged gradients of three passes over the same photos are equal bit for bit."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with start_process(device="cpu", num_threads=1, seed=0) as process:
        assert (process.rank, process.world_size) == (rank, world_size)
        model = UNet(num_classes=3)
        replicated = process.replicate(model, example=torch.zeros(1, 3, 32, 32))
        photos = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(rank))
        passes = []
        for _ in range(3):
            replicated.zero_grad()
            replicated(photos).square().sum().backward()
            passes.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    return all(torch.equal(passes[0], each) for each in passes[1:]) and len(passes[0]) > 100_000


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
