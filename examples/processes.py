"""Find this process's rank and device by the launcher's environment, and compute over all ranks."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Process", "start_process"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals before a preemption or at the end of the allowed time."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One of the processes that train together."""

    rank: int
    world_size: int
    device: torch.device
    is_launched: bool
    """Whether torchrun started it, if only by itself: then there is a process group."""
    told: list[int] = field(default_factory=list)
    """The `STOP_SIGNALS` that this process has received."""

    def replicate(self, model: nn.Module, *, example: Tensor) -> nn.Module:
        """The model whose backward pass averages gradients over the ranks; it shares ``model``'s parameters.

        Args:
            model: On the device.
            example: Any batch that it takes, on the device.
        """
        if not self.is_launched:
            return model
        replicated = DistributedDataParallel(
            model, device_ids=None if self.device.index is None else [self.device.index]
        )
        # After its first backward pass it sorts the gradients anew into buckets, and with them the order in which those
        # of more than two ranks are added up. Had it to be done in the first step, a resumed run's first step would be
        # one rounding off the unbroken run's.
        replicated(example).sum().backward()
        replicated.zero_grad()
        return replicated

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on every rank."""
        total = values.clone()
        if self.is_launched:
            distributed.all_reduce(total)
        return total

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all ranks, on every rank."""
        return self.sum(values) / self.world_size

    def stop_signal(self) -> int:
        """The signal that told any of the ranks to stop, on every rank; 0 while none did.

        For all ranks to ask after the same step: signals reach some earlier than others, or not at all, and a rank that
        stopped by itself would leave the others waiting for its gradients.
        """
        told = torch.tensor(max(self.told, default=0), device=self.device)
        if self.is_launched:
            distributed.all_reduce(told, op=distributed.ReduceOp.MAX)
        return int(told)

    def seed_step(self, seed: int, step: int) -> None:
        """Make what torch draws in this step, for dropout say, a function of seed, step and rank.

        A resumed run then draws what the unbroken one did, and no generator's state has to be kept for any rank.
        """
        torch.manual_seed((seed << 40) + step * self.world_size + self.rank)


@contextlib.contextmanager
def start_process(*, device: str, num_threads: int, seed: int) -> Iterator[Process]:
    """Take this process's place: the GPU that ``LOCAL_RANK`` names, or the CPU, and the process group of torchrun.

    From then on a signal of `STOP_SIGNALS` is noted for `Process.stop_signal`, and ends nothing by itself.

    On the CPU a run is reproducible bit for bit: the number of threads is fixed, and an operator that could not give
    the same bits twice is an error.

    Args:
        device: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        num_threads: Of torch, on the CPU.
        seed: What the model's first parameters are drawn from, the same on every rank.

    Raises:
        ValueError: If ``device="gpu"`` and there is none.
    """
    is_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "gpu" and not is_gpu:
        raise ValueError("--device gpu, and torch finds no CUDA device; pass --device cpu")
    if is_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    is_launched = "RANK" in os.environ
    if is_launched:
        distributed.init_process_group("nccl" if is_gpu else "gloo")
    process = Process(
        rank=distributed.get_rank() if is_launched else 0,
        world_size=distributed.get_world_size() if is_launched else 1,
        device=torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu"),
        is_launched=is_launched,
    )
    before = {number: signal.signal(number, lambda came, _: process.told.append(came)) for number in STOP_SIGNALS}
    try:
        yield process
        # Not after an error: the other ranks are in the middle of a step, and torchrun ends them.
        if is_launched:
            # All at once: who started them may end the others when one has ended, and rank 0 writes the checkpoint.
            distributed.barrier()
            distributed.destroy_process_group()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
