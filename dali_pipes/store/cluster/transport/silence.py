"""Tell a cluster that is silent for a while from one that answers wrongly, by the exceptions of `requests`."""

import requests
import urllib3
from urllib3.exceptions import NameResolutionError

from dali_pipes.store.cluster.transport.http_limits import ProtocolError, TooSlowError
from dali_pipes.store.messages import innermost, wrapped_in

_SILENCE = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    urllib3.exceptions.ProtocolError,
    urllib3.exceptions.TimeoutError,
)


def is_silence(exc: Exception, *, has_answered: bool) -> bool:
    """Whether an exception of `requests` or `urllib3` means that nothing answers for a while.

    A server that answers wrongly is not silent. A name that does not resolve, and a TLS connection that ends early,
    count only for a cluster that has answered.
    """
    causes = list(wrapped_in(exc))
    if any(isinstance(cause, ProtocolError | TooSlowError) for cause in causes):
        return False
    if any(isinstance(cause, NameResolutionError) for cause in causes):
        return has_answered
    if isinstance(exc, requests.exceptions.SSLError):
        return has_answered and type(innermost(exc)).__name__ in ("SSLEOFError", "SSLZeroReturnError")
    return isinstance(exc, _SILENCE)
