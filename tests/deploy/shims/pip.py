"""What pip is asked for, written down, and a few files as the real packages leave them."""

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

TAG = "{}{}".format(*sys.version_info[:2])
FILES = (
    "torch/__init__.py",
    "torch/include/ATen/ATen.h",
    "torch/lib/libtorch_cuda.so",
    "nvidia/cu13/include/cuda.h",
    "nvidia/cu13/lib/libcudart.so.13",
    "nvidia/cu13/lib/libcudart_static.a",
    "nvidia/dali/include/dali/c_api.h",
    "nvidia/dali/backend_impl.cpython-39-x86_64-linux-gnu.so",
    f"nvidia/dali/backend_impl.cpython-{TAG}-x86_64-linux-gnu.so",
    "triton/__init__.py",
)


def main() -> int:
    """``python3 -m pip``, as the Dockerfile's steps call it."""
    words = sys.argv[1:]
    packages = Path(sysconfig.get_path("purelib"))
    with Path(os.environ["PIP_LOG_OF_TEST"]).open("a") as log:
        log.write(json.dumps(words) + "\n")
    if words[0] == "install" and "-r" in words:
        for name in FILES:
            path = packages / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    elif words[0] == "uninstall":
        shutil.rmtree(packages / words[-1], ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
