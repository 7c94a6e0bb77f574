"""Find the engines' programs, or install them by apt."""

import os
import shutil
import subprocess

import pytest

PACKAGES = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "munged": "munge", "unshare": "util-linux"}
"""Program -> Debian's package, where the names differ."""


def need(*programs: str) -> None:
    """Install what is missing; skip the test where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("engines want root")
    missing = [name for name in programs if shutil.which(name) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        pytest.skip(f"no {', '.join(missing)}, and no apt-get to install them")
    packages = sorted({PACKAGES.get(name, name) for name in missing})
    subprocess.run(["apt-get", "update", "-q"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(
        ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
    )


def version(*command: str) -> str:
    """The first line that a program prints."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return (done.stdout or done.stderr).splitlines()[0]
