"""How to reach servers over HTTP: certificates, proxies of the environment, and who gets a token."""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.token import Token, is_token_for
from dali_pipes.store.cluster.transport.proxies import Proxies, split_endpoints
from dali_pipes.store.messages import is_loopback

_TRUE = ("1", "t", "true", "y", "yes", "on")


@dataclass(frozen=True, kw_only=True)
class HttpAccess:
    """The address of a store, and the certificates for it."""

    endpoint: str
    """Its URL, for messages too."""
    ca: Path | None = None
    """Certificates to trust, a file or a directory; ``None``: those that `requests` trusts."""
    client_cert: tuple[Path, Path] | None = None
    """Certificate and key, for a server that authenticates its clients."""
    skip_verify: bool = False
    """Accept any certificate."""
    ca_variable: ClassVar[str] = "SSL_CERT_FILE"
    """The environment variable that names ``ca``, for messages."""

    def headers_for(self, url: str) -> list[str]:
        """The lines that belong to each request for a URL."""
        return []

    def tls_context(self) -> ssl.SSLContext:
        """Make TLS settings as `requests` would; a `StoreError` if a certificate or key cannot be read."""
        from certifi import where
        from urllib3.util.ssl_ import create_urllib3_context

        context = create_urllib3_context()
        context.set_alpn_protocols(["http/1.1"])
        if self.skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        else:
            trusted = self.ca or Path(where())
            try:
                if trusted.is_dir():
                    context.load_verify_locations(capath=trusted)
                else:
                    context.load_verify_locations(cafile=trusted)
            except OSError as exc:
                raise StoreError(f"cannot read certificates from '{trusted}': {exc}; check {self.ca_variable}") from exc
        if self.client_cert:
            certificate, key = self.client_cert
            try:
                context.load_cert_chain(certificate, key)
            except OSError as exc:
                text = f"cannot read the client's certificate '{certificate}' with its key '{key}': {exc}"
                raise StoreError(f"{text}; check AIS_CRT and AIS_CRT_KEY") from exc
        return context

    def proxy_for(self, url: str) -> str | None:
        """Return the HTTP proxy that the environment names for a URL; ``None`` if the endpoint is on this machine."""
        from requests.utils import get_environ_proxies, select_proxy

        if is_loopback(self.endpoint):
            return None
        proxy: str | None = select_proxy(url, get_environ_proxies(url)) or None
        return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


@dataclass(frozen=True, kw_only=True)
class CloudAccess(HttpAccess):
    """The address of a cloud's store, or of any web server. Requests carry their own signature."""

    @classmethod
    def from_environment(cls, endpoint: str, *, skip_verify: bool = False) -> "CloudAccess":
        """Read AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE, SSL_CERT_FILE and SSL_CERT_DIR; the first counts."""
        variables = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")
        ca = next(filter(None, map(os.environ.get, variables)), None)
        return cls(endpoint=endpoint, ca=Path(ca) if ca else None, skip_verify=skip_verify)


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

        The token is found by `dali_pipes.store.cluster.token.Token.from_environment`.

        If AIS_CLIENT_CA is not set, REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE count. (In `requests`, which the SDK uses,
        they take precedence over it, and over AIS_SKIP_VERIFY_CRT.) They do not count for an endpoint on this machine,
        as in `dali_pipes.store.cluster.client`.
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

    def headers_for(self, url: str) -> list[str]:
        """The token, for the proxies that the user named."""
        has_token = self.token and any(is_token_for(named, url) for named in self.proxies.named)
        return [f"Authorization: Bearer {self.bearer}"] if has_token else []
