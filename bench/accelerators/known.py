"""The accelerators that ``bench run --au`` emulates: a batch size, and the time that a step takes on the real one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One emulated accelerator. A step of it is a sleep: whatever it computes, it computes outside the host."""

    name: str
    batch_size: int
    """Samples of a step."""
    compute_s: float
    """Seconds of a step."""
    mlperf_target: float | None = None
    """The utilisation that MLPerf Storage asks for, if the accelerator is one of theirs."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--au '{self.name}': the batch must have at least 1 sample, got {self.batch_size}")
        if not (math.isfinite(self.compute_s) and 0 < self.compute_s < 60):
            raise ValueError(
                f"--au '{self.name}': a step must take more than 0 and less than 60 s, got {self.compute_s:g}"
            )

    @property
    def samples_per_s(self) -> float:
        """Samples that it takes in a second, if it never waits."""
        return self.batch_size / self.compute_s

    @classmethod
    def parse(cls, text: str) -> "Accelerator":
        """Read a name of `ACCELERATORS`, or ``NAME:BATCH:SECONDS``.

        Raises:
            ValueError: If it is neither.

        >>> Accelerator.parse("tiny:8:0.01").samples_per_s
        800.0
        """
        if text in ACCELERATORS:
            return ACCELERATORS[text]
        name, *numbers = text.split(":")
        try:
            batch_size, compute_s = int(numbers[0]), float(numbers[1])
            is_whole = bool(name) and len(numbers) == 2
        except (ValueError, IndexError):
            is_whole = False
        if not is_whole:
            raise ValueError(
                f"--au expects one of {', '.join(ACCELERATORS)}, or NAME:BATCH:SECONDS such as mine:256:0.11, "
                f"got '{text}'"
            )
        return cls(name=name, batch_size=batch_size, compute_s=compute_s)


ACCELERATORS: Mapping[str, Accelerator] = {
    one.name: one
    for one in (
        # Workloads of MLPerf Storage that read photos: `reader.batch_size`, `train.computation_time` and `metric.au` in
        # mlcommons/storage, configs/dlio/workload/NAME.yaml. ResNet-50: v2.0, commits ac0424fa (H100) and be18c3e5
        # (A100). RetinaNet: v3.0, commits 11460d00 (B200) and 76f45459 (MI355).
        Accelerator(name="resnet50_h100", batch_size=400, compute_s=0.224, mlperf_target=0.90),
        Accelerator(name="resnet50_a100", batch_size=400, compute_s=0.435, mlperf_target=0.90),
        Accelerator(name="retinanet_b200", batch_size=24, compute_s=0.04755, mlperf_target=0.85),
        Accelerator(name="retinanet_mi355", batch_size=32, compute_s=0.0634, mlperf_target=0.85),
    )
}
