#!/usr/bin/env bash
# A virtual environment to what a training without torch.compile reads of it, 1.2 GB less; it can be run again.
#
#   deploy/prune.sh /opt/venv
set -euo pipefail

readonly venv=${1:?the virtual environment}
packages=$("$venv/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
tag=$("$venv/bin/python3" -c 'import sys; print("%d%d" % sys.version_info[:2])')
readonly packages tag
if [[ ! -d $packages/torch || ! -d $packages/nvidia/dali ]]; then
  printf 'prune.sh: %s has no torch and no nvidia/dali; name the environment that they were installed in\n' \
    "'$packages'" >&2
  exit 2
fi

# torch.compile on GPUs: it wants a C compiler, too, for its launchers.
"$venv/bin/python3" -m pip uninstall --quiet --yes triton
# Headers and static libraries: for torch.compile on CPUs, extensions in C++ or CUDA, plugins of DALI.
find "$packages/torch" "$packages/nvidia" -type f \( -path '*/include/*' -o -name '*.a' \) -delete
# DALI's modules for other Pythons.
find "$packages/nvidia/dali" -name 'backend_impl.cpython-*.so' ! -name "backend_impl.cpython-$tag-*" -delete
