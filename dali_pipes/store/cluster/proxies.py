"""How a cluster is reached: which of its proxies is asked now, its map, and the token and certificates for it."""

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urljoin, urlsplit

from dali_pipes.errors import StoreError
from dali_pipes.formats.names import read_json
from dali_pipes.store.cluster.token import Token, is_token_for
from dali_pipes.store.http.client import PROMPT_S, HttpAccess, HttpClient, NoAnswerError
from dali_pipes.store.http.rules import cause_of, cut_hint, is_away, tls_text
from dali_pipes.store.http.wire import Answer, ProtocolError, Stopped, never
from dali_pipes.store.messages import check_endpoint_url, is_loopback

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


_MAX_JSON_BYTES = 4 << 20
_TRUE = ("1", "t", "true", "y", "yes", "on")
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

    def turn_from(self, url: str, *, status: int | None = None) -> None:
        """Ask another proxy from now on, if the one that is asked now failed for a URL below it.

        ``status``: its answer; only 400 and 503 mean that it may be starting or stopping. ``None``: there was none.
        """
        with self._lock:
            if status in (None, 400, 503) and _is_below(url, self._known[self._current]):
                self._current = (self._current + 1) % len(self._known)

    def ask_map(
        self, client: HttpClient, *, timeout_s: float = PROMPT_S, stopped: Stopped = never
    ) -> ClusterMap | None:
        """Ask for the cluster's map once; ``None`` if the token may not read it. Raises what `ask_json` raises."""
        found = ask_json(client, self.current, "daemon?what=smap", timeout_s=timeout_s, stopped=stopped)
        return None if found is None else ClusterMap.from_json(found)

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

    def rewritten(self, url: str) -> str:
        """The URL at the current proxy, if it lies below any of them; else the URL itself."""
        with self._lock:
            current, known = self._known[self._current], next(filter(partial(_is_below, url), self._known), "")
        return current.rstrip("/") + url[len(known.rstrip("/")) :] if known else url

    def _add(self, urls: Iterable[str]) -> None:
        self._known += [url for url in dict.fromkeys(urls) if url not in self._known]


def _is_below(url: str, proxy: str) -> bool:
    return f"{url}/".startswith(f"{proxy.rstrip('/')}/")


def _remake(named: tuple[str, ...], known: tuple[str, ...], has_answered: bool) -> Proxies:
    proxies = Proxies(named, has_answered=has_answered)
    proxies._add(known)
    return proxies


@dataclass(frozen=True, kw_only=True)
class ClusterAccess(HttpAccess):
    """The address of a cluster, and the token and certificates for it."""

    endpoint: str
    """URL of an AIStore proxy, ``http://host:51080``, or several with commas between them; kept is the first."""
    token: Token | None = None
    """Token of AIStore's AuthN."""
    ca_variable: ClassVar[str] = "AIS_CLIENT_CA"
    proxies: Proxies = None  # type: ignore[assignment]  # made from the endpoint, if not given
    """The proxies of the cluster, which a store shares with its fetchers."""

    def __post_init__(self) -> None:
        named = split_endpoints(self.endpoint)
        object.__setattr__(self, "endpoint", named[0])
        object.__setattr__(self, "proxies", self.proxies or Proxies(named))

    @property
    def bearer(self) -> str | None:
        """The token as it is now."""
        return self.token.current() if self.token else None

    @classmethod
    def from_environment(cls, endpoint: str, *, proxies: Proxies | None = None) -> "ClusterAccess":
        """Read the variables of the ``aistore`` SDK: AIS_CLIENT_CA, AIS_CRT, AIS_CRT_KEY, AIS_SKIP_VERIFY_CRT.

        The token is found by `dali_pipes.store.cluster.token.Token.from_environment`. If AIS_CLIENT_CA is not set,
        REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE count, but not for an endpoint on this machine.
        """
        environment = os.environ
        certificate, key = environment.get("AIS_CRT"), environment.get("AIS_CRT_KEY")
        skips = environment.get("AIS_SKIP_VERIFY_CRT", environment.get("AIS_SKIP_VERIFY", ""))
        bundles = [] if is_loopback(endpoint) else ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"]
        ca = next(filter(None, map(environment.get, ["AIS_CLIENT_CA", *bundles])), None)
        return cls(
            endpoint=endpoint,
            proxies=proxies,  # type: ignore[arg-type]
            token=Token.from_environment(),
            ca=Path(ca) if ca else None,
            client_cert=(Path(certificate), Path(key)) if certificate and key else None,
            skip_verify=skips.strip().lower() in _TRUE,
        )

    def headers_for(self, url: str) -> list[tuple[str, str]]:
        """The token, for the proxies that the user named."""
        has_token = self.token and any(is_token_for(named, url) for named in self.proxies.named)
        return [("Authorization", f"Bearer {self.bearer}")] if has_token else []

    def note_answer(self, answer: Answer, text: str = "") -> bool:
        """Note what an answer says of proxy and token; whether the cluster, or a part of it, is away for a while.

        ``text`` is its reason. A token that has expired counts as away, if its file will be replaced.
        """
        self.proxies.has_answered = True
        if answer.status < 400:
            if self.token is not None and "/v1/health" not in answer.url:  # a health check is answered without one
                self.token.note_accepted()
            return False
        is_waiting = self.token is not None and self.token.is_replaced_soon(answer.status, text)
        if not is_waiting and not is_away(answer.status, text):
            return False
        self.proxies.turn_from(answer.url, status=answer.status)
        return True


def ask_json(
    client: HttpClient,
    proxy: str,
    path: str,
    *,
    body: bytes = b"",
    timeout_s: float = PROMPT_S,
    stopped: Stopped = never,
) -> Any:
    """Ask a proxy once for ``/v1/`` and a path; a cluster that is away is not waited for.

    Returns:
        The answer as JSON; ``None`` for a refusal: the token may not know.

    Raises:
        NoAnswerError: If there is no answer, or the proxy is starting.
        StoppedError: If ``stopped``.
        ValueError: If the answer is not JSON.
    """
    url = f"{urljoin(proxy, 'v1')}/{path}"
    headers = [("Content-Type", "application/json")] if body else []
    answer = client.ask(url, headers=headers, body=body, silence_s=timeout_s, stopped=stopped)
    try:
        found = answer.read_short(_MAX_JSON_BYTES)
    except (OSError, ProtocolError) as exc:
        raise NoAnswerError(url, exc, is_sent=True) from exc
    finally:
        answer.close()
    if is_away(answer.status, found[:1000].decode(errors="replace")):
        raise NoAnswerError(url, ConnectionError(f"it answers {answer.status}"), is_sent=True)
    return read_json(found) if answer.status == 200 else None


def unreached(access: HttpAccess, url: str, cause: BaseException) -> StoreError:
    """The error for a cluster that has not answered a request for ``url``: what failed, and what to do."""
    if text := tls_text(cause):
        return StoreError(f"{access.endpoint} {text}")
    if proxy := access.proxy_for(url):
        scheme, mark, rest = proxy.rpartition("://")
        return StoreError(
            f"no answer from AIStore at {access.endpoint} through the proxy '{scheme}{mark}{rest.rpartition('@')[2]}' "
            f"({cause_of(cause)}); name the host in NO_PROXY to reach it directly, or pass another --endpoint"
        )
    hint = cut_hint(cause, url, has_certificate=access.client_cert is not None)
    return StoreError(
        f"no answer from AIStore at {access.endpoint} ({cause_of(cause)}){hint}; is it running? pass endpoint= "
        "(--endpoint), or set AIS_ENDPOINT"
    )
