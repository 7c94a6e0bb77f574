"""Read and write tuning files: the decode settings that ``dali-pipes tune`` found to be fastest on a machine.

A file is used only on the machine that it was made on: the same processor, number of cores and GPU. A caller's own
settings take precedence. No setting changes the order: with a file or without one, batches hold the same samples, and
on the CPU the same pixels. On a GPU the JPEG engines and CUDA kernels may round a photo differently (``bench gpu
--scenarios parity`` shows by how much). ``hw_decoder_load`` and a photo's position in the batch decide whether the
engines or the kernels decode it.
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
from dali_pipes.formats.names import read_json
from dali_pipes.options import Decode
from dali_pipes.processes.ranks import cores_of_rank
from dali_pipes.store.local import LocalStore

_log = logging.getLogger(__name__)

TUNING_VARIABLE = "DALI_PIPES_TUNING"
FORMAT = "dali-pipes tuning 1"
# DALI's own default. Two batches ahead hide one slow batch; each further one costs memory.
PREFETCH_QUEUE_DEPTH = 2

# Files of another machine about which this process has logged a warning, by path.
_logged: set[Path] = set()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine for which settings hold."""

    cpu: str
    """The processor's name."""
    cores: int
    """Cores that a rank may keep busy, see `dali_pipes.processes.ranks.cores_of_rank`."""
    gpu: str | None
    """The GPU's name; ``None`` for settings of the CPU."""

    @classmethod
    def here(cls, device_id: int | None) -> "Machine":
        """Describe this machine; ``device_id`` is the CUDA device that decodes, ``None`` for the CPU."""
        gpu = None
        if device_id is not None:
            import torch

            gpu = torch.cuda.get_device_name(device_id)
        return cls(cpu=_cpu_name(), cores=cores_of_rank(), gpu=gpu)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a loader's decoding."""

    num_threads: int
    prefetch_queue_depth: int
    hw_decoder_load: float | None = None
    """Part of a batch's JPEGs for the GPU's JPEG engines, in [0, 1]; ``None`` on the CPU, and for DALI's default."""

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
    """The measurements behind the settings, for people to read."""

    def write(self, path: Path) -> None:
        """Write the file, or replace it atomically.

        Raises:
            StoreError: If the directory does not exist or is not writable.
        """
        report = {"format": FORMAT, **asdict(self), "measured": dict(self.measured)}
        LocalStore(path.resolve().parent).write(path.name, (json.dumps(report, indent=2) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> "Tuning":
        """Read the file at ``path``.

        Raises:
            DataError: If the file is missing, or is not a tuning file.
        """
        make = f"make it: dali-pipes tune URL -o {path}"
        try:
            report = read_json(path.read_text())
        except OSError as exc:
            raise DataError(f"tuning file '{path}' cannot be read: {exc.strerror}; {make}") from exc
        except ValueError as exc:
            raise DataError(f"tuning file '{path}' is not JSON ({exc}); {make}") from exc
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


def choose_settings(decode: Decode, *, device_id: int | None) -> Settings:
    """Choose a loader's settings: the caller's, else those of a tuning file, else the defaults.

    The defaults are one thread for each core that this rank may keep busy, 2 batches decoded ahead, and DALI's default
    for the JPEG engines. A file made on another machine is not used; this is logged once. A loader on the CPU does not
    use a GPU's file, and vice versa.

    Raises:
        DataError: If the tuning file is missing, or is not a tuning file.
    """
    path = decode.tuning or os.environ.get(TUNING_VARIABLE)
    tuned = _for_this_machine(Path(path), device_id) if path else None
    found = tuned or Settings(num_threads=cores_of_rank(), prefetch_queue_depth=PREFETCH_QUEUE_DEPTH)
    return Settings(
        num_threads=decode.threads or found.num_threads,
        prefetch_queue_depth=decode.queue_depth or found.prefetch_queue_depth,
        hw_decoder_load=found.hw_decoder_load if decode.engine_share is None else decode.engine_share,
    )


def _for_this_machine(path: Path, device_id: int | None) -> Settings | None:
    tuning = Tuning.read(path)
    if (tuning.machine.gpu is None) != (device_id is None):
        # A job may train on the GPU and validate on the CPU, with one file in its environment.
        _log.info("tuning file '%s' is for the %s: not used here", path, "CPU" if device_id is not None else "GPU")
        return None
    here = Machine.here(device_id)
    if tuning.machine == here:
        return tuning.settings
    if path not in _logged:
        _logged.add(path)
        differences = "; ".join(
            f"{name} {expected!r}, here {getattr(here, name)!r}"
            for name, expected in asdict(tuning.machine).items()
            if expected != getattr(here, name)
        )
        advice = f"make one here: dali-pipes tune URL -o {path}"
        _log.warning("tuning file '%s' was made on another machine (%s) and is not used; %s", path, differences, advice)
    return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
