"""Find this process's rank and device in the launcher's environment, and compute over all ranks."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Schedulers send these before a preemption, or at the end of the allowed time."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One of the processes that train together."""

    rank: int
    world_size: int
    device: torch.device
    is_launched: bool
    """Whether torchrun started it, even as the only process: then there is a process group."""
    told: list[int] = field(default_factory=list)
    """The `STOP_SIGNALS` that this process has received."""

    def replicate(self, model: nn.Module, *, example: Tensor) -> nn.Module:
        """Return a model that shares ``model``'s parameters and averages gradients over the ranks.

        Args:
            model: On the device.
            example: Any batch that the model accepts, on the device.
        """
        if not self.is_launched:
            return model
        replicated = DistributedDataParallel(
            model, device_ids=None if self.device.index is None else [self.device.index]
        )
        # After its first backward pass it sorts the gradients into new buckets. This changes the order in which the
        # gradients of more than two ranks are added. So do that pass now: otherwise the first step of a resumed run
        # would differ from the same step of an unbroken run by rounding.
        replicated(example).sum().backward()
        replicated.zero_grad()
        return replicated

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, on every rank."""
        total = values.clone()
        if self.is_launched:
            distributed.all_reduce(total)
        return total

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over all ranks, on every rank."""
        return self.sum(values) / self.world_size

    def stop_signal(self) -> int:
        """Return on every rank the signal that told any rank to stop; 0 if there was none.

        All ranks call this after the same step. Signals reach some ranks earlier than others, or not at all, and a rank
        that stopped alone would leave the others waiting for its gradients.
        """
        told = torch.tensor(max(self.told, default=0), device=self.device)
        if self.is_launched:
            distributed.all_reduce(told, op=distributed.ReduceOp.MAX)
        return int(told)

    def seed_step(self, seed: int, step: int) -> None:
        """Make torch's random numbers in this step, for example for dropout, a function of seed, step and rank.

        A resumed run then draws the same numbers as an unbroken run, without the state of any generator.
        """
        torch.manual_seed((seed << 40) + step * self.world_size + self.rank)


@contextlib.contextmanager
def start_process(*, device: str, num_threads: int, seed: int) -> Iterator[Process]:
    """Choose the GPU that ``LOCAL_RANK`` names, or the CPU, and join the process group of torchrun.

    From then on `STOP_SIGNALS` do not end the process; `Process.stop_signal` reports them.

    On the CPU a run is reproducible bit for bit: the number of threads is fixed, and an operator that is not
    deterministic is an error.

    Args:
        device: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        num_threads: Torch's threads, on the CPU.
        seed: For the model's first parameters; the same on every rank.

    Raises:
        ValueError: If ``device="gpu"`` and there is none.
    """
    is_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "gpu" and not is_gpu:
        raise ValueError("--device gpu, but torch finds no CUDA device; pass --device cpu")
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
        # This is skipped after an error: then the other ranks are in the middle of a step, and torchrun ends them.
        if is_launched:
            # End together: the launcher may end all ranks when one has ended, and rank 0 still writes the checkpoint.
            distributed.barrier()
            distributed.destroy_process_group()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
