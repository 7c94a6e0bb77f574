"""Emulate a training step: a batch is there, and for so long nobody asks for the next.

On the CPU the step is a sleep. What it stands for runs on an accelerator, so it must leave the cores to those who
decode; MLPerf Storage emulates it in the same way. On CUDA it is a chain of matrix products on the stream that the
batch was delivered on, as many as take that long on an idle device, and the host waits for them: decode on the GPU then
shares it with a step as it does in a training, and is neither given the whole device, as a sleep would, nor one that
only looks busy, as a spinning kernel of one thread would.
"""

import time
from collections.abc import Callable

__all__ = ["Step", "open_step"]

Step = Callable[[float], None]
"""Takes the share of a whole batch that came, 1.0 for all of it; returns when the step is over."""

MATRIX_SIDE = 2048
CALIBRATION_S = 0.05


def open_step(compute_s: float, *, device: str) -> Step:
    """A step of ``compute_s`` with a whole batch.

    Args:
        compute_s: Seconds; 0 is no step at all.
        device: ``cpu`` or ``cuda``, where batches are delivered.
    """
    if compute_s <= 0:
        return _no_step
    return _cuda_step(compute_s) if device == "cuda" else lambda share: time.sleep(compute_s * share)


def _no_step(share: float) -> None:
    del share


def _cuda_step(compute_s: float) -> Step:
    import torch

    matrix = torch.randn(MATRIX_SIDE, MATRIX_SIDE, dtype=torch.float16, device="cuda")
    product = torch.empty_like(matrix)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=product)
        torch.cuda.current_stream().synchronize()

    multiply(8)  # the library chooses its kernel, the clock of the device goes up
    times = 1
    while True:
        started = time.perf_counter()
        multiply(times)
        elapsed = time.perf_counter() - started
        if elapsed >= CALIBRATION_S:
            break
        times *= 2
    per_second = times / elapsed

    def step(share: float) -> None:
        multiply(max(1, round(compute_s * share * per_second)))

    return step
