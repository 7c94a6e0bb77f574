"""The HTTP client below all stores: which connections it uses again, and answers that come early."""

import contextlib
import itertools
import socket

import pytest

from dali_pipes.store.http.client import HttpAccess, HttpClient, NoAnswerError
from dali_pipes.store.http.wire import StoppedError


def test_name_that_no_resolver_takes_is_no_answer() -> None:
    client = HttpClient(HttpAccess(endpoint="http://a..b"))
    with pytest.raises(NoAnswerError, match="not the name of a host"):
        client.ask("http://a..b/o")


def test_connection_that_is_not_made_ends_when_the_thread_is_to_stop() -> None:
    """A host that drops packets: whoever closes a loader must not wait for all of its addresses."""
    with contextlib.ExitStack() as cleanup:
        full = cleanup.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # nobody accepts, so the kernel drops further requests for a connection
            waiting = cleanup.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        client = cleanup.enter_context(contextlib.closing(HttpClient(HttpAccess(endpoint=url), connect_timeout_s=600)))
        answers = itertools.chain([False, False], itertools.repeat(True))
        with pytest.raises(StoppedError):
            client.ask(url, stopped=lambda: next(answers))
