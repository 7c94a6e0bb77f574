"""Choose the reader of a loader."""

import logging

from dali_pipes.reader.aio import Aio
from dali_pipes.reader.aio_reader import AioReader
from dali_pipes.reader.buffers import Buffers
from dali_pipes.reader.segments import SegmentReader
from dali_pipes.reader.webdataset import WebdatasetReader

_log = logging.getLogger(__name__)


def open_reader(path: str, *, kind: str = "auto", buffers: Buffers | None = None) -> SegmentReader:
    """Open a reader of the cache file.

    Args:
        path: The cache file.
        kind: ``"aio"``, ``"webdataset"``, or ``"auto"``: the first that the system allows.
        buffers: Where ``"aio"`` puts encoded bytes; ``None``: in ordinary memory.

    Raises:
        OSError: If ``kind`` is ``"aio"`` and the system does not allow it.
    """
    if kind != "webdataset":
        try:
            aio = Aio()
        except OSError as exc:
            if kind == "aio":
                raise
            _log.warning(
                "the system does not allow asynchronous I/O of Linux (%s): DALI's reader is used, which takes more CPU "
                "time; dali-pipes doctor says what to allow",
                exc.strerror,
            )
        else:
            return AioReader(path, aio=aio, buffers=buffers or Buffers())
    return WebdatasetReader(path)
