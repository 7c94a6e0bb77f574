"""Find the user of the process at the other end of a connection on loopback.

TCP carries no user, but the kernel knows the owner of the client's socket. It answers a question about one connection
by netlink (``sock_diag``). Where it does not, the same is in the tables ``/proc/net/tcp`` and ``tcp6``, which list all
connections of the machine.

# Note [owner]: A socket whose process closed it while the connection still ends has no inode, and older kernels give it
to user 0. So a row without an inode names nobody. The kernel reads a row's user and inode one after the other; the
second of two looks therefore proves that the socket still had its owner at the first.
"""

import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

Address = tuple[str, int]
"""An IPv4 address and a port."""

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NO_COOKIE = 0xFFFFFFFF
_ALL_STATES = 0xFFFFFFFF
_HEAD = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, sender
_DIAG_START = 16 + 4 + 48  # nlmsghdr; family, state, timer, retransmissions; the two addresses
_DIAG_TAIL = struct.Struct("=IIIII")  # expires, receive queue, send queue, user, inode
_TIMEOUT_S = 1.0

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def peer_uid(client: Address, server: Address) -> int | None:
    """Return the user id of the client's socket of an accepted connection, or ``None`` if nobody owns it any more."""
    uid = _ask_kernel(client, server)
    return uid if uid is not None else _read_tables(client, server)


def _ask_kernel(client: Address, server: Address) -> int | None:
    """Ask for one connection; 13 us, whatever the number of connections."""
    ends = struct.pack("!HH", client[1], server[1])
    ends += socket.inet_aton(client[0]).ljust(16, b"\0") + socket.inet_aton(server[0]).ljust(16, b"\0")
    body = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + ends
    body += struct.pack("=III", 0, _NO_COOKIE, _NO_COOKIE)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as asking:
            asking.settimeout(_TIMEOUT_S)
            head = _HEAD.pack(_HEAD.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
            asking.sendto(head + body, (0, 0))
            answer, sender = asking.recvfrom(4096)
    except OSError:
        return None
    is_answer = sender[0] == 0 and len(answer) >= _DIAG_START + _DIAG_TAIL.size
    if not is_answer or _HEAD.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    *_, uid, inode = _DIAG_TAIL.unpack_from(answer, _DIAG_START)
    return int(uid) if inode else None


def _read_tables(client: Address, server: Address) -> int | None:
    """Look into the tables; milliseconds, more with more connections."""
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
    """Return the owner of the client's socket from the rows of ``/proc/net/tcp`` or ``tcp6``, without the heading.

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


def is_own(client: Address, server: Address) -> bool:
    """Whether the client of an accepted connection is a process of this process's user."""
    return peer_uid(client, server) == os.geteuid()
