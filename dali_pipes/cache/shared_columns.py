"""Map the columns of a large manifest from one file, so that the loaders of a machine hold them once.

Every loader reads the manifest from its store. The first one of a cache file writes the columns beside it. Each one
compares the file with its own columns, maps it, and drops its own: nothing is believed that the store did not say.
"""

import logging
import mmap
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.cache.directory import DamagedFileError, OwnDirectory

_log = logging.getLogger(__name__)

SHARED_FROM_BYTES = 4 << 20
"""Smaller columns, of some 60,000 shards, are not worth a file."""


def share_columns(
    files: OwnDirectory, key: str, columns: Mapping[str, npt.NDArray[Any]]
) -> dict[str, npt.NDArray[Any]] | None:
    """Map the file of these columns, which is made if it is not there; call it under the cache's mutex.

    Returns:
        Read-only arrays of the same values; ``None`` if no file can be made or mapped, as on a full disk.
    """
    name = f"{key}.columns"
    try:
        try:
            return _mapped(files, name, columns)
        except FileNotFoundError:
            pass
        except DamagedFileError as exc:
            files.set_aside(name, str(exc))
        _write(files, name, f".{key}.partial", columns)
        return _mapped(files, name, columns)
    except (OSError, DamagedFileError) as exc:
        _log.info("the manifest's columns are not shared: '%s' cannot be used (%s)", files.path / name, exc)
        return None


def _write(files: OwnDirectory, name: str, partial: str, columns: Mapping[str, npt.NDArray[Any]]) -> None:
    files.remove(partial)
    file = files.open(partial, flags=os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.writelines(np.ascontiguousarray(column).data for column in columns.values())
        files.rename(partial, name)
    except BaseException:
        files.remove(partial)
        raise


def _mapped(files: OwnDirectory, name: str, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The columns in the file. Raises `DamagedFileError` if they are others."""
    num_bytes = sum(column.nbytes for column in columns.values())
    file = files.open(name)
    try:
        if (found := os.fstat(file).st_size) != num_bytes:
            raise DamagedFileError(f"'{name}' has {found} bytes, expected {num_bytes}")
        memory = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    shared, start = {}, 0
    for column, own in columns.items():
        # The columns of 8 bytes come first, so each begins at a multiple of its item's size.
        shared[column] = np.frombuffer(memory, own.dtype, len(own), start)
        start += own.nbytes
        if not np.array_equal(shared[column], own):
            raise DamagedFileError(f"'{name}' holds another column '{column}' than the store's manifest")
    return shared
