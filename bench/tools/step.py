"""Emulate a training step: the time between receiving a batch and asking for the next one.

On the CPU the step is a sleep, as MLPerf Storage emulates it: a real step runs on an accelerator, and leaves the cores
to the decoders. On CUDA it is a chain of matrix products on the stream that the batch was delivered on, as many as take
that long on an idle device, and the host waits for them. So decoding on the GPU shares the device with a step.
"""

import time
from collections.abc import Callable

Step = Callable[[float], None]
"""Takes the share of a whole batch that came, 1.0 for all of it; returns when the step is over."""

# One product takes a fifth of a millisecond on a Hopper GPU: long enough for few launches, which cost the host little
# time, and short enough to compose any step.
MATRIX_SIDE = 4096
# Ever more products are timed, until they take this long. The runs before take as long together, and warm up the
# device: the clocks of an idle one take a while to go up.
CALIBRATION_S = 0.3


def open_step(compute_s: float, *, device: str) -> Step:
    """Return a step that takes ``compute_s`` for a whole batch, on ``cpu`` or ``cuda``, where batches are delivered; 0:
    none.
    """
    if compute_s <= 0:
        return lambda share: None
    return _cuda_step(compute_s) if device == "cuda" else lambda share: time.sleep(compute_s * share)


def _cuda_step(compute_s: float) -> Step:
    import torch

    matrix = torch.randn(MATRIX_SIDE, MATRIX_SIDE, dtype=torch.float16, device="cuda")
    product = torch.empty_like(matrix)

    # Blocking: by default the host spins while it waits, and takes a core from the decoders.
    over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch types its methods only

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=product)
        over.record()  # type: ignore[no-untyped-call, unused-ignore]  # newer versions have types
        over.synchronize()

    multiply(8)  # the library chooses its kernel
    times, elapsed = 1, 0.0
    while elapsed < CALIBRATION_S:
        times *= 2
        started = time.perf_counter()
        multiply(times)
        elapsed = time.perf_counter() - started
    per_second = times / elapsed
    return lambda share: multiply(max(1, round(compute_s * share * per_second)))
