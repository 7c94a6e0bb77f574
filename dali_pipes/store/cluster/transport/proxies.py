"""The proxies of a cluster: those that the user names, those that its map lists, and which one is asked now."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dali_pipes.store.messages import check_endpoint_url

SETTLED_S = 10.0
"""An object may still be missing for a moment after the map has changed: a rebalance begins late."""


@dataclass(frozen=True)
class ClusterMap:
    """What a look at the cluster's map shows."""

    version: int
    proxies: tuple[str, ...]
    """URLs in the network for clients."""
    targets: frozenset[str]
    """Ids of the targets that serve requests: not those in maintenance, and not those that leave."""

    @classmethod
    def from_json(cls, data: Any) -> "ClusterMap":
        """Read the answer to ``GET /v1/daemon?what=smap``; a `ValueError` if it is not one."""
        try:
            nodes = data["pmap"].values()
            urls = tuple(str(node["public_net"]["direct_url"]) for node in nodes)
            targets = frozenset(str(name) for name, node in data["tmap"].items() if not node.get("flags", 0) & _AWAY)
            return cls(int(data["version"]), urls, targets)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ValueError("the answer is not a cluster's map") from exc


# Flags of a node in the map (AIStore's core/meta): in maintenance, being decommissioned.
_AWAY = 1 << 2 | 1 << 3


def split_endpoints(endpoint: str) -> tuple[str, ...]:
    """The URLs in a text with commas between them.

    Raises:
        ValueError: If one of them is not a URL, or holds a password; names it.

    >>> split_endpoints("http://a:51080, http://b:51080")
    ('http://a:51080', 'http://b:51080')
    """
    if "@" in endpoint:
        check_endpoint_url(endpoint)  # as it is: a password may hold a comma, and no part of it is shown
    urls = tuple(url.strip() for url in endpoint.split(","))
    for url in urls:
        check_endpoint_url(url)
    return urls


class Proxies:
    """Which proxy of a cluster is asked. All stores, sessions and fetchers of one store share it; it pickles.

    A request goes to `current`. Who gets no answer there calls `turn_from`; then the next one is asked.
    """

    def __init__(self, named: tuple[str, ...], *, has_answered: bool = False) -> None:
        self.named = named
        """As the user gave them; the first one stands for the cluster in messages."""
        self.has_answered = has_answered
        """Whether the cluster has ever answered: then it is away if it does not, and not misspelt."""
        self._lock = threading.Lock()
        self._known = list(named)
        self._current = 0
        self.map: ClusterMap | None = None
        """The first look at the map."""
        self.settled_version: int | None = None
        """The version of the map at the last look of a listing."""
        self.has_asked_map = False
        """Whether there was an attempt at it: a token may not be allowed to look."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (self.named, tuple(self._known), self.has_answered)

    @property
    def current(self) -> str:
        with self._lock:
            return self._known[self._current]

    def turn_from(self, failed: str) -> None:
        """Ask another proxy from now on, if ``failed`` is the one that is asked now."""
        with self._lock:
            if self._known[self._current] == failed:
                self._current = (self._current + 1) % len(self._known)

    def turn_if_at(self, url: str) -> None:
        """`turn_from` the current proxy if a URL lies below it."""
        asked = self.current
        if url.startswith(f"{asked.rstrip('/')}/"):
            self.turn_from(asked)

    def turn_if_starting(self, status: int, url: str) -> None:
        """`turn_from` the current proxy if it gave this answer for ``url``, and may be starting or stopping."""
        if status in (400, 503):
            self.turn_if_at(url)

    def learn(self, found: ClusterMap, *, has_token: bool) -> None:
        """Take the map's other proxies for times when the named ones are away.

        Not with a token: a token goes only to hosts that the user named. Not with another scheme than the first one's.
        """
        scheme = f"{urlsplit(self.named[0]).scheme}://"
        with self._lock:
            if self.map is None:
                self.map, self.settled_version = found, found.version
            if not has_token:
                self._add(url for url in found.proxies if url.startswith(scheme))

    def lacks_targets(self, found: ClusterMap) -> bool:
        """Whether a target is missing that was there at the first look."""
        return self.map is not None and not self.map.targets <= found.targets

    def is_proxy(self, url: str) -> bool:
        """Whether a URL is one of the proxies, or lies below one."""
        with self._lock:
            return any(url == known or url.startswith(f"{known.rstrip('/')}/") for known in self._known)

    def rewritten(self, url: str) -> str:
        """The URL at the current proxy, if it lies below any of them; else the URL itself."""
        with self._lock:
            current = self._known[self._current].rstrip("/")
            for known in self._known:
                if url.startswith(f"{known.rstrip('/')}/"):
                    return current + url[len(known.rstrip("/")) :]
        return url

    def _add(self, urls: Iterable[str]) -> None:
        self._known += [url for url in dict.fromkeys(urls) if url not in self._known]


def _remake(named: tuple[str, ...], known: tuple[str, ...], has_answered: bool) -> Proxies:
    proxies = Proxies(named, has_answered=has_answered)
    proxies._add(known)
    return proxies
