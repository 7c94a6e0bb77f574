"""The SDK's client, whose requests go through our HTTP client."""

from typing import TYPE_CHECKING

from dali_pipes.store.cluster.proxies import ClusterAccess, Proxies, split_endpoints
from dali_pipes.store.http.client import CONNECT_TIMEOUT_S, PROMPT_S, SILENCE_S
from dali_pipes.store.patience import IMPATIENT, Patience

if TYPE_CHECKING:
    from aistore import Client
    from aistore.sdk.request_client import RequestClient
    from aistore.sdk.retry_config import RetryConfig


def ais_client(endpoint: str, *, proxies: Proxies | None = None, patience: Patience = IMPATIENT) -> "Client":
    """The SDK's client, whose requests wait as ``patience`` says. Token and TLS: `ClusterAccess.from_environment`."""
    from aistore import Client

    from dali_pipes.store.cluster.sessions import PatientSessions

    proxies = proxies or Proxies(split_endpoints(endpoint))
    client = Client(proxies.named[0], retry_config=_no_retries(), timeout=(CONNECT_TIMEOUT_S, SILENCE_S))
    requesting = client.cluster().client
    requesting.token = ""  # the SDK would send the token that it found at the start, for ever
    requesting.session_manager = PatientSessions(ClusterAccess.from_environment(endpoint, proxies=proxies), patience)
    return client


def prompt_client(bulk: "RequestClient") -> "RequestClient":
    """A client over the same connections with a shorter timeout for answers."""
    from aistore.sdk.request_client import RequestClient

    return RequestClient(
        bulk.base_url,
        session_manager=bulk.session_manager,
        timeout=(CONNECT_TIMEOUT_S, PROMPT_S),
        retry_config=_no_retries(),
    )


def _no_retries() -> "RetryConfig":
    """Turn the SDK's own retries off: they also repeat requests for missing objects, for about a minute."""
    from aistore.sdk.retry_config import ColdGetConf, RetryConfig
    from tenacity import Retrying, stop_after_attempt
    from urllib3.util.retry import Retry

    return RetryConfig(
        http_retry=Retry(total=0),
        network_retry=Retrying(stop=stop_after_attempt(1), reraise=True),
        cold_get_conf=ColdGetConf(),
    )
