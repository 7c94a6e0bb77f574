"""Describe the origin of figures, as JSON: versions, hardware, commit and date."""

import datetime
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dali_pipes.errors import PipesError
from dali_pipes.tuning import Machine

PACKAGES = (
    "dali-pipes",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "torch",
    "torchvision",
    "webdataset",
    "aistore",
    "pillow",
    "numpy",
    "psutil",
    "spdl",
    "litdata",
    "mosaicml-streaming",
    "megatron-energon",
    "s3torchconnector",
)

_BLOCK = bytes(1 << 20)
EXTRAS = ("matplotlib", "psutil", "torchvision")


def available_cores() -> int:
    """The cores that this process may use. Under ``taskset`` or Slurm the machine has more."""
    return len(os.sched_getaffinity(0))


def quiet_ms() -> float:
    """Time a fixed loop on all cores at once, in ms of wall time: another program on this machine makes it longer."""

    def loop(_: int) -> None:
        made = hashlib.sha256()
        for _ in range(32):
            made.update(_BLOCK)  # without Python's lock

    with ThreadPoolExecutor(available_cores()) as pool:
        began = time.perf_counter()
        list(pool.map(loop, range(available_cores())))
    return round(1000 * (time.perf_counter() - began), 2)


def check_extras() -> None:
    """Say in one line which packages of the extra ``bench`` are missing, before anything is read or started."""
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise PipesError(f"benchmarks need {' and '.join(missing)}; install: pip install 'dali-pipes[bench]'")


def describe_environment() -> dict[str, Any]:
    """Describe what a figure depends on besides its options. The result names no host, user or path."""
    import torch

    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **describe_commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        "versions": _versions(),
        "cpu": {
            "model": Machine.here(None).cpu,
            "cores": os.cpu_count(),
            "cores_available": available_cores(),
            "load_average_1min": round(os.getloadavg()[0], 2),
        },
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_commit() -> dict[str, Any]:
    """Return the last commit that changed the code, and whether the code differs from it.

    Changes of documents, records and tests do not count. Both values are ``None`` for an installed package.
    """
    root = Path(__file__).resolve().parents[2]
    try:
        if not (root / ".git").exists():
            raise FileNotFoundError
        commit, changed = _git(root, "log", "-1", "--format=%H", *_CODE), _git(root, "status", "--porcelain", *_CODE)
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "is_dirty": None}
    return {"commit": commit, "is_dirty": bool(changed)}


_CODE = ("--", ".", ":!docs", ":!*.md", ":!bench/results", ":!tests")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True, timeout=10)  # noqa: S603, S607
    return done.stdout.strip()
