"""Check that an AIStore proxy answers and is ready, before anything starts."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.client import CONNECT_TIMEOUT_S, ais_client
from dali_pipes.store.cluster.transport.proxies import split_endpoints
from dali_pipes.store.messages import answer_text, innermost, no_answer, unchained
from dali_pipes.store.patience import Ahead, Waiting, current_patience, pause

Answer = TypeVar("Answer")


def ask_ready(endpoint: str, ask: Callable[[str], Answer]) -> tuple[str, Answer]:
    """`check_endpoint`, and what ``ask`` answers for the endpoint that it returns; both are asked at the same time.

    The check would cost two round trips before each other request. If the first check fails, the cluster was not ready:
    then that answer does not count, and ``ask`` is called again.
    """
    with Ahead(partial(ask, endpoint)) as asked:
        ready, is_first = _find_ready(endpoint)
        return ready, asked.result() if is_first else ask(ready)


def check_endpoint(endpoint: str) -> str:
    """Ask the cluster for its health; returns the endpoint with a proxy that is ready in front.

    Asks once, or as long as the context's `Patience.start_s` says.

    Raises:
        StoreError: If nothing answers there within three seconds, or no server there is a ready AIStore.
        ValueError: If ``endpoint`` is not a URL, or several with commas between them.
    """
    return _find_ready(endpoint)[0]


def _find_ready(endpoint: str) -> tuple[str, bool]:
    """See `check_endpoint`; and whether the first check of the first proxy succeeded."""
    urls = split_endpoints(endpoint)
    waiting = Waiting(current_patience(), urls[0])
    while True:
        for number, url in enumerate(urls):
            try:
                _check_health(url)
            except _RefusedError:
                raise  # waiting changes nothing
            except StoreError as exc:
                failure = exc
            else:
                is_first = number == waiting.num_failures == 0
                waiting.progress()
                return ",".join((url, *urls[:number], *urls[number + 1 :])), is_first
        pause_s = waiting.next_pause_s(str(failure), has_answered=False)
        if pause_s is None:
            raise failure
        pause(pause_s)


class _RefusedError(StoreError):
    """The server answers, but not this client."""


def _check_health(endpoint: str) -> None:
    import requests

    try:
        session = ais_client(endpoint).cluster().client.session_manager.session
        url = f"{endpoint.rstrip('/')}/v1/health"
        answer = session.get(url, params={"prr": "true"}, timeout=CONNECT_TIMEOUT_S)
    except (requests.RequestException, OSError, ValueError) as exc:
        raise StoreError(no_answer(endpoint, exc)) from unchained(innermost(exc))
    if answer.status_code == 400 and "HTTPS server" in answer.text[:200]:
        raise StoreError(f"{endpoint} speaks TLS; the endpoint must begin with https://")
    if answer.status_code == 403:
        raise _RefusedError(f"{endpoint} refuses a health check: {answer_text(403, answer.text)}")
    if answer.status_code != 200:
        raise StoreError(
            f"{endpoint} answers {answer.status_code} to a health check, a ready AIStore proxy answers 200; "
            "is it still starting? pass endpoint= (--endpoint), or set AIS_ENDPOINT"
        )
    if not any(name.lower().startswith("ais-") for name in answer.headers):
        raise StoreError(
            f"the server at {endpoint} is not an AIStore: its health check has no Ais-* header; "
            "pass endpoint= (--endpoint), or set AIS_ENDPOINT"
        )
