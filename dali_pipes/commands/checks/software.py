"""Check Python, the installed packages and DALI's build."""

import importlib
import importlib.metadata
import os
import platform

from dali_pipes.commands.checks.findings import Findings, counted, fail, ok

PACKAGES = ("dali-pipes", "torch", "aistore", "webdataset", "numpy", "pillow", "safetensors")
DALI_PACKAGE = "nvidia-dali-cuda"


def check_python() -> Findings:
    """Python, the system, and the cores that this process may use."""
    cores, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    shown = f"{cores} of {all_cores} cores" if cores < all_cores else counted(cores, "core")
    system = f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}"
    yield ok("python", f"{platform.python_version()} on {system}, {shown}")


def check_packages() -> Findings:
    """Packages without which loaders do not run."""
    versions = {name: version_of(name) for name in PACKAGES}
    lacking = [name for name, version in versions.items() if version is None]
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    if lacking:
        yield fail("packages", f"{there}; not {', '.join(lacking)}", f"install: pip install {' '.join(lacking)}")
    else:
        yield ok("packages", there)


def check_dali() -> Findings:
    """Exactly one build of DALI, which can be loaded."""
    builds = dali_builds()
    if not builds:
        advice = "install nvidia-dali-cuda120, or nvidia-dali-cuda130 on a CUDA 13 machine"
        yield fail("DALI", "not installed", advice)
        return
    named = ", ".join(f"{name} {version}" for name, version in builds.items())
    if len(builds) > 1:
        advice = f"they share one directory; keep one: pip uninstall {' '.join(builds)}, then install that one again"
        yield fail("DALI", f"{named}, both", advice)
        return
    try:
        importlib.import_module("nvidia.dali")  # loads its libraries, touches no device
    except (ImportError, OSError) as exc:
        yield fail("DALI", f"{named} cannot be loaded: {' '.join(str(exc).split())}", "install it again")
        return
    yield ok("DALI", named)


def version_of(package: str) -> str | None:
    """The version of an installed package; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def dali_builds() -> dict[str, str]:
    """Installed builds of DALI -> version."""
    names = (f"{DALI_PACKAGE}{cuda}" for cuda in ("110", "120", "130", "140"))
    return {name: version for name in names if (version := version_of(name)) is not None}


def cuda_major(dali_package: str) -> int:
    """The major version of CUDA that a build of DALI is for.

    >>> cuda_major("nvidia-dali-cuda120")
    12
    """
    return int(dali_package.removeprefix(DALI_PACKAGE)) // 10
