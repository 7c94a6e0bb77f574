"""Preloaded into the fork server, and imported nowhere else: a client that vanishes does not end the server.

Ctrl-C ends a turn's process whatever it is doing, also while it asks the server for a worker. The server of Python 3.11
to 3.13 then raises ``EOFError``, which ends it with a traceback. It goes on after an aborted connection, which this is.
"""

import errno
import os
from multiprocessing import reduction
from socket import socket

_receive = reduction.recvfds


def _recvfds(sock: socket, size: int) -> list[int]:
    try:
        return _receive(sock, size)
    except EOFError:
        raise ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED)) from None


reduction.recvfds = _recvfds
