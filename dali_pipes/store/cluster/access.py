"""How a cluster is reached: which of its proxies is asked now, its map, and the token and certificates for it."""

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urljoin, urlsplit

from dali_pipes.errors import StoreError, keep_secret, printable
from dali_pipes.formats.names import read_json
from dali_pipes.store.http.client import PROMPT_S, HttpAccess, HttpClient, NoAnswerError, is_loopback, read_end
from dali_pipes.store.http.rules import cause_of, cut_hint, is_away, is_server_url, tls_text
from dali_pipes.store.http.wire import Answer, Stopped
from dali_pipes.store.patience import is_told_to_end

SETTLED_S = 10.0
"""An object may still be missing for a moment after the map has changed: a rebalance begins late."""
VARIABLE = "AIS_AUTHN_TOKEN"
FILE_VARIABLE = "AIS_AUTHN_TOKEN_FILE"
LOGIN_FILE = ".config/ais/cli/auth.token"
"""The file that ``ais auth login`` writes, below the home directory."""

_MAX_FILE_BYTES = 1 << 20
_MAX_JSON_BYTES = 4 << 20
_TRUE = ("1", "t", "true", "y", "yes", "on")
# Flags of a node in the map (AIStore's core/meta): in maintenance, being decommissioned.
_AWAY = 1 << 2 | 1 << 3
# Files with tokens that a cluster has accepted in this process.
_accepted: set[Path] = set()


@dataclass(frozen=True)
class Token:
    """A token of AIStore's AuthN, as text or in a file. A file is read for each request: tokens can be rotated.

    It can be pickled. The text is in no `repr`, so that no log and no traceback shows it; and no text of a server
    that repeats it, see `dali_pipes.errors.keep_secret`.
    """

    text: str = field(default="", repr=False)
    file: Path | None = None
    """A file with the token alone, or with ``{"token": ...}``, as ``ais auth login`` writes it."""
    _last: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """The token that was last read from the file; empty before."""

    def __post_init__(self) -> None:
        if self.file is None:
            _check_token(self.text, f"is {VARIABLE} complete?")

    @classmethod
    def from_environment(cls) -> "Token | None":
        """Find the token as AIStore's own command line does.

        ``AIS_AUTHN_TOKEN`` is the token; else ``AIS_AUTHN_TOKEN_FILE`` names the file; else the file counts which
        ``ais auth login`` writes, ``~/.config/ais/cli/auth.token``, if it is there.

        Raises:
            StoreError: If ``AIS_AUTHN_TOKEN`` cannot be a token.
        """
        if text := os.environ.get(VARIABLE):
            try:
                return cls(text)
            except ValueError as exc:
                raise StoreError(str(exc)) from None
        if named := os.environ.get(FILE_VARIABLE):
            return cls(file=Path(named))
        with contextlib.suppress(OSError, RuntimeError):
            written = Path.home() / LOGIN_FILE
            if written.is_file():
                return cls(file=written)
        return None

    def current(self) -> str:
        """The token as it is now.

        Raises:
            StoreError: If the file cannot be read, or does not hold a token, and held none before. While a file is
                being replaced, the token that it held counts.
        """
        if self.file is None:
            keep_secret(self.text)  # in a process that unpickled it, too
            return self.text
        try:
            self._last[:] = [_token_in(self.file)]
        except (OSError, ValueError) as exc:
            if not self._last:
                reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
                raise StoreError(
                    f"cannot read the token file '{self.file}': {reason}; log in anew (ais auth login), or set "
                    f"{FILE_VARIABLE} or {VARIABLE}"
                ) from exc
        return self._last[0]

    def is_replaced_soon(self, status: int, text: str) -> bool:
        """Whether an answer says that the token has expired, and its file will be replaced: others were accepted."""
        return status == 401 and "token expired" in text and self.file in _accepted

    @property
    def source(self) -> str:
        """Where the token comes from, for messages."""
        return VARIABLE if self.file is None else f"the file '{self.file}'"

    def __getstate__(self) -> dict[str, Any]:
        return {"text": self.text, "file": self.file, "_last": []}


def _token_in(file: Path) -> str:
    """Read a token file; a ``ValueError`` says what is wrong with it, and never repeats its content."""
    with file.open("rb") as stream:
        text = stream.read(_MAX_FILE_BYTES).decode("utf-8", errors="replace").strip()
    if text.startswith("{"):
        try:
            value = json.loads(text)["token"]
        except (ValueError, KeyError, RecursionError):
            raise ValueError('it is JSON without a "token"') from None
        text = value if isinstance(value, str) else ""
    if not text:
        raise ValueError("it holds no token")
    _check_token(text, "is the file complete?")
    return text


def _check_token(text: str, advice: str) -> None:
    keep_secret(text)
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise ValueError(f"the token must have only printable ASCII characters; {advice}")


def refusal_advice(status: int, text: str, token: Token | None) -> str:
    """What to do about an answer 401 or 403, as the end of an error's text; empty for any other status.

    ``text`` is its message, ``token`` that of the request.
    """
    if status == 401:
        if token is None or "token required" in text:
            return f"; log in (ais auth login), or set {FILE_VARIABLE} or {VARIABLE}"
        state = "has expired" if "token expired" in text else "is not valid for this cluster"
        return f"; the token in {token.source} {state}: get a new one (ais auth login)"
    if status != 403 or "embedded node" in text:  # an embedded node knows no tokens, and says itself what to do
        return ""
    lacking = "the request has no token" if token is None else f"the token in {token.source} lacks a right"
    return f"; {lacking}: ask the cluster's administrator for it"


@dataclass(frozen=True)
class ClusterMap:
    """What a look at the cluster's map shows."""

    version: int
    proxies: tuple[str, ...]
    targets: frozenset[str]
    """Ids of the targets that serve requests: not those in maintenance, and not those that leave."""


class Proxies:
    """Which proxy of a cluster is asked. All stores, sessions and fetchers of one store share it; it pickles.

    A request goes to `current`. Who gets no answer there calls `turn_from`; then the next one is asked.
    """

    def __init__(self, named: tuple[str, ...]) -> None:
        self.named = named
        """As the user gave them; the first one stands for the cluster in messages."""
        self.current = named[0]
        self.has_answered = False
        """Whether the cluster has ever answered: then it is away if it does not, and not misspelt."""
        self.map: ClusterMap | None = None
        """The first look at the map."""
        self.settled_version: int | None = None
        """The version of the map at the last look of a listing."""
        self.has_asked_map = False
        """Whether there was an attempt at it: a token may not be allowed to look."""
        self._known = list(dict.fromkeys(named))  # with a URL twice, `turn_from` would never reach the URLs after it

    def turn_from(self, url: str, *, status: int | None = None) -> None:
        """Ask another proxy from now on, if the one that is asked now failed for a URL below it.

        ``status``: its answer; only 400 and 503 mean that it may be starting or stopping. ``None``: there was none.
        """
        current = self.current  # another thread may turn at the same time
        if status in (None, 400, 503) and _is_below(url, current):
            self.current = self._known[(self._known.index(current) + 1) % len(self._known)]

    def ask_map(
        self, client: HttpClient, *, timeout_s: float = PROMPT_S, stopped: Stopped = is_told_to_end
    ) -> ClusterMap | None:
        """Ask for the cluster's map once; ``None`` if the token may not read it. Raises what `ask_json` raises."""
        data = ask_json(client, self.current, "daemon?what=smap", timeout_s=timeout_s, stopped=stopped)
        if data is None:
            return None
        try:
            urls = tuple(str(node["public_net"]["direct_url"]) for node in data["pmap"].values())
            targets = frozenset(str(name) for name, node in data["tmap"].items() if not node.get("flags", 0) & _AWAY)
            return ClusterMap(int(data["version"]), urls, targets)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ValueError("the answer is not a cluster's map") from exc

    def learn(self, found: ClusterMap, *, has_token: bool) -> None:
        """Take the map's other proxies for times when the named ones are away.

        Not with a token: a token goes only to hosts that the user named. Not with another scheme than the first one's.
        """
        if self.map is None:
            self.map, self.settled_version = found, found.version
        if not has_token:
            scheme = f"{urlsplit(self.named[0]).scheme}://"
            self._known += [
                url for url in dict.fromkeys(found.proxies) if url.startswith(scheme) and url not in self._known
            ]

    def lacks_targets(self, found: ClusterMap) -> bool:
        """Whether a target is missing that was there at the first look."""
        return self.map is not None and not self.map.targets <= found.targets

    def rewritten(self, url: str) -> str:
        """The URL at the current proxy, if it lies below any of them; else the URL itself."""
        known = next((proxy for proxy in self._known if _is_below(url, proxy)), "")
        return self.current.rstrip("/") + url[len(known.rstrip("/")) :] if known else url


def _is_below(url: str, proxy: str) -> bool:
    return f"{url}/".startswith(f"{proxy.rstrip('/')}/")


@dataclass(frozen=True, kw_only=True)
class ClusterAccess(HttpAccess):
    """The address of a cluster, and the token and certificates for it."""

    endpoint: str
    """URL of an AIStore proxy, ``http://host:51080``, or several with commas between them; kept is the first."""
    token: Token | None = None
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

        The token: `Token.from_environment`. If AIS_CLIENT_CA is not set, REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE count,
        but not for an endpoint on this machine.
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
        """The token, for the proxies that the user named. A target has another address; it trusts the redirect."""
        has_token = self.token and any(_is_at(named, url) for named in self.proxies.named)
        return [("Authorization", f"Bearer {self.bearer}")] if has_token else []

    def note_answer(self, answer: Answer, text: str = "") -> bool:
        """Note what an answer says of proxy and token; whether the cluster, or a part of it, is away for a while.

        ``text`` is its reason. A token that has expired counts as away, if its file will be replaced.
        """
        self.proxies.has_answered = True
        if answer.status < 400:
            # A health check is answered without a token.
            if self.token is not None and self.token.file is not None and "/v1/health" not in answer.url:
                _accepted.add(self.token.file)
            return False
        is_waiting = self.token is not None and self.token.is_replaced_soon(answer.status, text)
        if not is_waiting and not is_away(answer.status, text):
            return False
        self.proxies.turn_from(answer.url, status=answer.status)
        return True


def split_endpoints(endpoint: str) -> tuple[str, ...]:
    """The URLs in a text with commas between them.

    Raises:
        ValueError: If one of them is not a URL, or holds a password; names it, and does not repeat a password.

    >>> split_endpoints("http://a:51080, http://b:51080")
    ('http://a:51080', 'http://b:51080')
    """
    if "@" in endpoint:
        host = endpoint.rpartition("@")[2]
        raise ValueError(
            f"the endpoint at '{printable(host)}' must not hold a password; set AIS_AUTHN_TOKEN to a token"
        )
    urls = tuple(url.strip() for url in endpoint.split(","))
    if odd := [url for url in urls if not is_server_url(url)]:
        raise ValueError(f"endpoint must be a URL such as http://localhost:51080, got '{printable(odd[0])}'")
    return urls


def _is_at(endpoint: str, url: str) -> bool:
    """Whether both have one scheme, host and port, or ``url`` the host's usual port for TLS in place of that without.

    >>> _is_at("https://ais:51080", "https://ais:51080/v1/objects/b/o")
    True
    >>> _is_at("https://ais:51080", "https://ais:51081/v1/objects/b/o")
    False
    """
    named, asked = (
        (parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        for parts in map(urlsplit, (endpoint, url))
    )
    host = named[1]
    return named == asked or (named == ("http", host, 80) and asked == ("https", host, 443))


def ask_json(
    client: HttpClient,
    proxy: str,
    path: str,
    *,
    body: bytes = b"",
    timeout_s: float = PROMPT_S,
    stopped: Stopped = is_told_to_end,
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
    found = read_end(answer, _MAX_JSON_BYTES)
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
