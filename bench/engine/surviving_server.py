"""Changes of the fork server and of the processes that it forks; the server preloads this, and nothing else imports it.

A client that vanishes leaves no traceback. Ctrl-C ends a turn's process whatever it is doing, also while it asks the
server for a worker. If it has not sent its descriptors, the server of Python 3.11 to 3.13 raises ``EOFError`` and ends;
it goes on after an aborted connection, which this is. If it has not sent what the worker shall do, the worker prints
the same error; it ends in silence here.

The garbage collector of a process leaves out what the server imported. A full collection visits these 500,000 objects,
and stopped all Python code for 0.5 s. Python starts one when enough objects have survived since the last one, a quarter
of all. All processes inherit the same count, so each turn of SPDL, 2,320 samples, had one collection. A long run had
one in 34,800 samples, 1 % of its time. A job imports fewer libraries, so its collections are shorter.
"""

import errno
import gc
import os
from multiprocessing import reduction, spawn
from pickle import UnpicklingError
from socket import socket

_receive, _main = reduction.recvfds, spawn._main


def _recvfds(sock: socket, size: int) -> list[int]:
    try:
        return _receive(sock, size)
    except EOFError:
        raise ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED)) from None


def _run(fd: int, parent_sentinel: int) -> int:
    gc.freeze()  # here the server has imported everything
    try:
        return _main(fd, parent_sentinel)  # an error of what it runs is not raised here
    except (EOFError, UnpicklingError) as exc:
        if isinstance(exc, UnpicklingError) and "truncated" not in str(exc):
            raise
        return 1


reduction.recvfds = _recvfds
spawn._main = _run
