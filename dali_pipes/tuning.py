"""A tuning file: what ``dali-pipes tune`` found out about a machine, to the settings that a loader decodes with.

A file holds for the machine that it was made on: another processor, number of cores or GPU, and it is not used. What a
caller asks for comes first, and no setting is an input of the order: with a file or without, batches hold the same
samples, and on the CPU the same pixels. On a GPU the JPEG engines and CUDA kernels may round a photo differently
(``bench gpu --scenarios parity`` says by how much), and which of them decodes it depends on ``hw_decoder_load`` and on
its place in the batch.
"""

import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dali_pipes.errors import DataError
from dali_pipes.ranks import cores_of_rank
from dali_pipes.store.local import LocalStore

__all__ = ["TUNING_VARIABLE", "Machine", "Settings", "Tuning", "choose_settings"]

_log = logging.getLogger(__name__)

TUNING_VARIABLE = "DALI_PIPES_TUNING"
FORMAT = "dali-pipes tuning 1"
# DALI's own default. Two batches hide a batch that takes longer than the others; each more costs its memory.
PREFETCH_QUEUE_DEPTH = 2

# Files that were told to be another machine's, by path: once in a process is enough.
_told: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What settings depend on."""

    cpu: str
    """The processor's name."""
    cores: int
    """Those that a rank may keep busy, see `dali_pipes.ranks.cores_of_rank`."""
    gpu: str | None
    """The GPU's name; ``None`` for settings of the CPU."""

    @classmethod
    def here(cls, device_id: int | None) -> "Machine":
        """That on which this runs, decoding on a CUDA device, or on the CPU (``None``)."""
        gpu = None
        if device_id is not None:
            import torch

            gpu = torch.cuda.get_device_name(device_id)
        return cls(cpu=_cpu_name(), cores=cores_of_rank(), gpu=gpu)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a loader decodes."""

    num_threads: int
    prefetch_queue_depth: int
    hw_decoder_load: float | None = None
    """Share of a batch's JPEGs for the GPU's JPEG engines; ``None``: DALI's own default, and on the CPU."""

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise ValueError(f"num_threads must be positive, got {self.num_threads}")
        if self.prefetch_queue_depth < 1:
            raise ValueError(f"prefetch_queue_depth must be positive, got {self.prefetch_queue_depth}")
        if self.hw_decoder_load is not None and not 0 <= self.hw_decoder_load <= 1:
            raise ValueError(f"hw_decoder_load must be in [0, 1], got {self.hw_decoder_load}")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A tuning file's content."""

    machine: Machine
    settings: Settings
    measured: Mapping[str, Any] = field(default_factory=dict)
    """What the settings were chosen by; for readers."""

    def write(self, path: Path) -> None:
        """Write it, replacing an earlier file once all is written.

        Raises:
            StoreError: If the directory is not there or takes no file.
        """
        report = {"format": FORMAT, **asdict(self), "measured": dict(self.measured)}
        LocalStore(path.resolve().parent).write(path.name, (json.dumps(report, indent=2) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> "Tuning":
        """The file at ``path``.

        Raises:
            DataError: If there is none, or it is no tuning file.
        """
        make = "make it: dali-pipes tune URL -o " + str(path)
        try:
            report = json.loads(path.read_text())
        except OSError as exc:
            raise DataError(f"tuning file '{path}' cannot be read: {exc.strerror}; {make}") from exc
        except ValueError as exc:
            raise DataError(f"tuning file '{path}' is no JSON ({exc}); {make}") from exc
        found = report.get("format") if isinstance(report, dict) else None
        if found != FORMAT:
            raise DataError(f"tuning file '{path}': expected format '{FORMAT}', found {found!r}; {make}")
        try:
            return cls(
                machine=Machine(**report["machine"]),
                settings=Settings(**report["settings"]),
                measured=report.get("measured", {}),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise DataError(f"tuning file '{path}' is broken: {exc}; {make}") from exc


def choose_settings(
    path: str | Path | None,
    *,
    device_id: int | None,
    num_threads: int | None = None,
    prefetch_queue_depth: int | None = None,
    hw_decoder_load: float | None = None,
) -> Settings:
    """What a loader decodes with: what was asked for, else what a tuning file says of this machine, else the defaults.

    Args:
        path: A tuning file. ``None``: the one that ``DALI_PIPES_TUNING`` names, if it is set. A file that was made for
            another machine is not used, which is told once; nor is one for the GPU by a loader on the CPU, or the
            other way round.
        device_id: The CUDA device that is decoded on, ``None`` for the CPU.
        num_threads: As asked for; by default one for each core that this rank may keep busy.
        prefetch_queue_depth: As asked for; 2 by default.
        hw_decoder_load: As asked for; DALI's own by default.

    Raises:
        DataError: If the file is not there, or no tuning file.
        ValueError: If something that was asked for is out of its range.
    """
    named = path or os.environ.get(TUNING_VARIABLE) or None
    tuned = None if named is None else _for_this_machine(Path(named), device_id)
    if num_threads is None:
        num_threads = tuned.num_threads if tuned else cores_of_rank()
    if prefetch_queue_depth is None:
        prefetch_queue_depth = tuned.prefetch_queue_depth if tuned else PREFETCH_QUEUE_DEPTH
    if hw_decoder_load is None and tuned is not None:
        hw_decoder_load = tuned.hw_decoder_load
    return Settings(num_threads=num_threads, prefetch_queue_depth=prefetch_queue_depth, hw_decoder_load=hw_decoder_load)


def _for_this_machine(path: Path, device_id: int | None) -> Settings | None:
    tuning = Tuning.read(path)
    if (tuning.machine.gpu is None) != (device_id is None):
        # A job may train on the GPU and validate on the CPU, with one file in its environment.
        _log.info("tuning file '%s' is for the %s: not used here", path, "CPU" if device_id is not None else "GPU")
        return None
    here = Machine.here(device_id)
    if tuning.machine == here:
        return tuning.settings
    if str(path) not in _told:
        _told.add(str(path))
        differences = "; ".join(
            f"{name} {expected!r}, here {found!r}"
            for (name, expected), found in zip(asdict(tuning.machine).items(), asdict(here).values(), strict=True)
            if expected != found
        )
        _log.warning(
            "tuning file '%s' is another machine's (%s) and is not used; make one here: dali-pipes tune URL -o %s",
            path,
            differences,
            path,
        )
    return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
