"""Find the user of the process at the other end of a connection on loopback.

TCP carries no user, but the kernel knows the owner of the client's socket: the tables ``/proc/net/tcp`` and ``tcp6``
list all connections of the machine.

# Note [owner]: A socket whose process closed it while the connection still ends has no inode, and older kernels give it
to user 0. So a row without an inode names nobody. The kernel reads a row's user and inode one after the other; the
second of two looks therefore proves that the socket still had its owner at the first.
"""

import socket
import struct
from collections.abc import Iterable
from pathlib import Path

Address = tuple[str, int]
"""An IPv4 address and a port."""

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def peer_uid(client: Address, server: Address) -> int | None:
    """Return the user id of the client's socket of an accepted connection, or ``None`` if nobody owns it any more."""
    for path in _TABLES:
        looks = []
        for _ in range(2):  # Note [owner]
            try:
                with path.open() as rows:
                    looks.append(find_uid(rows, client=client, server=server))
            except OSError:
                break
        if len(looks) == 2 and looks[1] is not None:
            return looks[0]
    return None


def find_uid(rows: Iterable[str], *, client: Address, server: Address) -> int | None:
    """Return the owner of the client's socket from the rows of ``/proc/net/tcp`` or ``tcp6``.

    ``None`` means that there is no such socket, or that it has no owner any more. A table of IPv6 has the clients that
    connected by an IPv6 socket to an IPv4 address.
    """
    local, remote = _forms(client), _forms(server)
    for row in rows:
        fields = row.split()
        if len(fields) > 9 and fields[1] in local and fields[2] in remote:
            return int(fields[7]) if fields[9] != "0" else None
    return None


def _forms(address: Address) -> tuple[str, str]:
    """How the kernel prints an address: 32-bit words in the byte order of the machine; and mapped into IPv6."""
    ip = socket.inet_aton(address[0])
    words = struct.unpack("=4I", bytes(10) + b"\xff\xff" + ip)
    return f"{words[3]:08X}:{address[1]:04X}", f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"
