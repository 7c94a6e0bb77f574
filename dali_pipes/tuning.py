"""Read and write tuning files: the decode settings that ``dali-pipes tune`` found to be fastest on a machine.

A file is used only on the machine that it was made on: the same processor, number of cores and GPU. No setting changes
the order, nor the pixels on the CPU. On a GPU the JPEG engines and CUDA kernels may round a photo differently (``bench
gpu --scenarios parity`` shows by how much).
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
_logged: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine for which settings hold."""

    cpu: str
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
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
        return cls(cpu=cpu or platform.machine(), cores=cores_of_rank(), gpu=gpu)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a loader's decoding."""

    num_threads: int
    prefetch_queue_depth: int
    hw_decoder_load: float | None = None
    """Part of a batch's JPEGs for the GPU's JPEG engines, in [0, 1]; ``None`` on the CPU, and for DALI's default."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A tuning file's content."""

    machine: Machine
    settings: Settings
    measured: Mapping[str, Any] = field(default_factory=dict)
    """The measurements behind the settings, for people to read."""

    def write(self, path: Path) -> None:
        """Write the file, or replace it atomically."""
        report = {"format": FORMAT, **asdict(self), "measured": dict(self.measured)}
        LocalStore(path.resolve().parent).write(path.name, (json.dumps(report, indent=2) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> "Tuning":
        """Read the file; a `DataError` if it is missing, or is not a tuning file of this version."""
        try:
            report = read_json(path.read_text())
            if report["format"] != FORMAT:
                raise ValueError(f"expected format '{FORMAT}', found {report['format']!r}")
            # The class of options checks the values of the settings.
            settings = Settings(**report["settings"])
            Decode(
                threads=settings.num_threads,
                queue_depth=settings.prefetch_queue_depth,
                engine_share=settings.hw_decoder_load,
            )
            return cls(machine=Machine(**report["machine"]), settings=settings, measured=report["measured"])
        except (OSError, KeyError, TypeError, ValueError) as exc:
            raise DataError(
                f"tuning file '{path}' cannot be used: {exc}; make it: dali-pipes tune URL -o {path}"
            ) from exc


def choose_settings(decode: Decode, *, device_id: int | None) -> Settings:
    """Choose a loader's settings: the caller's, else those of a tuning file, else the defaults.

    The defaults are one thread for each core that this rank may keep busy, 2 batches decoded ahead, and DALI's default
    for the JPEG engines. A file made on another machine is not used; this is logged once. A loader on the CPU does not
    use a GPU's file, and vice versa: a job may train on the GPU and validate on the CPU.

    Raises:
        DataError: If the tuning file is missing, or is not a tuning file.
    """
    path = decode.tuning or os.environ.get(TUNING_VARIABLE)
    found = Settings(num_threads=cores_of_rank(), prefetch_queue_depth=PREFETCH_QUEUE_DEPTH)
    if path:
        tuning, here = Tuning.read(Path(path)), Machine.here(device_id)
        if tuning.machine == here:
            found = tuning.settings
        elif (tuning.machine.gpu is None) == (device_id is None) and str(path) not in _logged:
            _logged.add(str(path))
            _log.warning(
                "tuning file '%s' was made on another machine (%s), this is %s: it is not used; make one here: "
                "dali-pipes tune URL -o %s",
                path,
                asdict(tuning.machine),
                asdict(here),
                path,
            )
    return Settings(
        num_threads=decode.threads or found.num_threads,
        prefetch_queue_depth=decode.queue_depth or found.prefetch_queue_depth,
        hw_decoder_load=found.hw_decoder_load if decode.engine_share is None else decode.engine_share,
    )
