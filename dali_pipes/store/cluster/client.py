"""The SDK's client with our sessions: they wait for a cluster that is away, and limit what its answers may cost.

So the SDK's own retries are off: they also repeat requests for missing objects, for about a minute.
"""

from typing import TYPE_CHECKING

from dali_pipes.store.cluster.token import Token, TokenAuth
from dali_pipes.store.cluster.transport.proxies import Proxies, split_endpoints
from dali_pipes.store.patience import IMPATIENT, Patience

if TYPE_CHECKING:
    from aistore import Client
    from aistore.sdk.request_client import RequestClient
    from aistore.sdk.retry_config import RetryConfig


# The time for one attempt to connect. An endpoint that does not answer must be reported within ten seconds.
CONNECT_TIMEOUT_S = 3.0
# The longest silence while a listing, HEAD or similar answer is awaited.
ANSWER_TIMEOUT_S = 10.0
# The longest silence of an object's bytes: a target may be under load, or read them from a cloud first.
READ_TIMEOUT_S = 60.0
# Connections kept open to one host: more than the number of threads that read.
MAX_POOL_SIZE = 32


def ais_client(endpoint: str, *, proxies: Proxies | None = None, patience: Patience = IMPATIENT) -> "Client":
    """The SDK's client, whose requests wait as ``patience`` says. TLS settings come from the SDK's variables.

    The token is found by `Token.from_environment`. A loopback endpoint is reached directly, even if the environment
    names a proxy.
    """
    from aistore import Client

    from dali_pipes.store.cluster.transport.sessions import PatientSessions

    proxies = proxies or Proxies(split_endpoints(endpoint))
    client = Client(proxies.named[0], retry_config=_no_retries(), timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S))
    requesting = client.cluster().client
    requesting.token = ""  # the SDK would send the token that it found at the start, for ever
    requesting.session_manager = PatientSessions(
        proxies,
        patience,
        auth=TokenAuth(Token.from_environment(), proxies.named),
        max_pool_size=MAX_POOL_SIZE,
    )
    return client


def prompt_client(bulk: "RequestClient") -> "RequestClient":
    """A client over the same connections with a shorter timeout for answers."""
    from aistore.sdk.request_client import RequestClient

    return RequestClient(
        bulk.base_url,
        session_manager=bulk.session_manager,
        timeout=(CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S),
        retry_config=_no_retries(),
    )


def _no_retries() -> "RetryConfig":
    """Turn the SDK's own retries off."""
    from aistore.sdk.retry_config import ColdGetConf, RetryConfig
    from tenacity import Retrying, stop_after_attempt
    from urllib3.util.retry import Retry

    return RetryConfig(
        http_retry=Retry(total=0),
        network_retry=Retrying(stop=stop_after_attempt(1), reraise=True),
        cold_get_conf=ColdGetConf(),
    )
