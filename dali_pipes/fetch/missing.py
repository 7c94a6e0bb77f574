"""Decide whether an object that a cluster does not find may come back: as long as the cluster changes, it may.

While a target restarts, the cluster's map lacks it, and its objects are missing (404). After it has joined again, or
another one took its place, a rebalance moves objects. Only a cluster that is complete and at rest lacks an object for
good.
"""

import time
from typing import Any
from urllib.parse import urljoin

from dali_pipes.fetch.parts import FetchedObject
from dali_pipes.fetch.transport.access import ClusterAccess
from dali_pipes.fetch.transport.connection_pool import ConnectionPool
from dali_pipes.fetch.transport.event_loop import Task
from dali_pipes.fetch.transport.http1 import AnswerBody
from dali_pipes.formats.names import read_json
from dali_pipes.store.cluster.transport.http_limits import ProtocolError
from dali_pipes.store.cluster.transport.http_rules import is_away
from dali_pipes.store.cluster.transport.proxies import SETTLED_S, ClusterMap

_MAX_MAP_BYTES = 4 << 20


def may_come_back(item: FetchedObject, access: ClusterAccess, pool: ConnectionPool) -> Task[bool]:
    """Whether the cluster has changed since the last look, lacks a target, or rebalances, or does not answer.

    Without an earlier look, which `Bucket.learn_map` takes, only a rebalance can tell.
    """
    try:
        answer = yield from _ask(access, pool, "daemon?what=smap", b"")
        if answer is None:
            return False  # the token may not read the map
        found = ClusterMap.from_json(answer)
        status = yield from _ask(access, pool, "cluster?what=status", b'{"kind":"rebalance"}')
    except (OSError, ProtocolError):
        return True
    except ValueError:
        return False
    before, now = access.proxies.map, time.monotonic()
    access.proxies.learn(found, has_token=bool(access.token))
    if item.map_version is None:
        item.map_version = found.version if before is None else before.version
    if item.map_version != found.version:
        item.map_version, item.settles_at = found.version, now + SETTLED_S
    is_rebalancing = isinstance(status, dict) and status.get("end_time") == 0
    is_incomplete = access.proxies.lacks_targets(found)
    return is_rebalancing or is_incomplete or now < item.settles_at


def _ask(access: ClusterAccess, pool: ConnectionPool, path: str, body: bytes) -> Task[Any]:
    """The answer as JSON; ``None`` for a refusal. A proxy that is starting counts as one that does not answer."""
    url = f"{urljoin(access.proxies.current, 'v1')}/{path}"
    connection, answer = yield from pool.get(url, byte_range=None, body=body)
    try:
        found = yield from AnswerBody(connection, answer).read_short(_MAX_MAP_BYTES)
    except BaseException:
        connection.close()
        raise
    pool.give_back(connection)
    if is_away(answer.status, found.decode(errors="replace")):
        raise ConnectionError(f"it answers {answer.status}")
    return read_json(found) if answer.status == 200 else None
