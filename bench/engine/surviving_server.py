"""Preloaded into the fork server, and imported nowhere else: what the server and the processes from it do otherwise.

A client that vanishes leaves no traceback. Ctrl-C ends a turn's process whatever it is doing, also while it asks the
server for a worker. If it has not sent its descriptors, the server of Python 3.11 to 3.13 raises ``EOFError`` and ends;
it goes on after an aborted connection, which this is. If it has not sent what the worker shall do, the worker prints
the same error; it ends in silence here.

The garbage collector of a forked process leaves out what the server imported. A full collection of these 500,000
objects stopped all threads for 0.5 s. In a long run of SPDL it came once in 34,800 samples, but in a turn of 2,320
samples it came each time, because a forked process takes over the collector's counts.
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
    gc.freeze()
    try:
        return _main(fd, parent_sentinel)  # an error of what it runs is not raised here
    except (EOFError, UnpicklingError) as exc:
        if isinstance(exc, UnpicklingError) and "truncated" not in str(exc):
            raise
        return 1


reduction.recvfds = _recvfds
spawn._main = _run
