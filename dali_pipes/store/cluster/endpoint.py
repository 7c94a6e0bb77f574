"""Provide an AIStore endpoint that answers: the given one, or that of an embedded node which is started for this."""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from dali_pipes.errors import StoreError, shown
from dali_pipes.store.base import DIRECT
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.cluster.access import ClusterAccess, split_endpoints, unreached
from dali_pipes.store.http.client import PROMPT_S, HttpClient, NoAnswerError, read_end
from dali_pipes.store.http.rules import answer_text
from dali_pipes.store.patience import Waiting, current_patience, pause
from dali_pipes.store.shard_names import split_bucket
from dali_pipes.store.urls import is_in_cluster, is_remote

_log = logging.getLogger(__name__)


def check_endpoint(endpoint: str) -> str:
    """Ask the cluster for its health; returns the endpoint with a proxy that is ready in front.

    Asks once, or as long as the context's `Patience.start_s` says.

    Raises:
        StoreError: If nothing answers there within three seconds, or no server there is a ready AIStore.
        ValueError: If ``endpoint`` is not a URL, or several with commas between them.
    """
    urls = split_endpoints(endpoint)
    waiting = Waiting(current_patience(), urls[0])
    while True:
        for number, url in enumerate(urls):
            try:
                _check_health(url)
            except StoreError as exc:
                failure = exc
            else:
                waiting.progress()
                return ",".join((url, *urls[:number], *urls[number + 1 :]))
        pause_s = waiting.next_pause_s(str(failure), has_answered=False)
        if pause_s is None:
            raise failure
        pause(pause_s)


def _check_health(endpoint: str) -> None:
    access = ClusterAccess.from_environment(endpoint)
    url = f"{endpoint.rstrip('/')}/v1/health?prr=true"
    try:
        with contextlib.closing(HttpClient(access)) as client:
            answer = client.ask(url, silence_s=PROMPT_S)
            said = read_end(answer).decode(errors="replace")
    except NoAnswerError as exc:
        raise unreached(access, url, exc.cause) from exc.cause
    if answer.status == 400 and "HTTPS server" in said[:200]:
        raise StoreError(f"{endpoint} speaks TLS; the endpoint must begin with https://")
    if answer.status == 403:
        raise StoreError(f"{endpoint} refuses a health check: {answer_text(403, said)}")
    if answer.status != 200:
        raise StoreError(
            f"{endpoint} answers {answer.status} to a health check, a ready AIStore proxy answers 200; "
            "is it still starting? pass endpoint= (--endpoint), or set AIS_ENDPOINT"
        )
    if not any(name.startswith("ais-") for name, _ in answer.headers.items()):
        raise StoreError(
            f"the server at {endpoint} is not an AIStore: its health check has no Ais-* header; "
            "pass endpoint= (--endpoint), or set AIS_ENDPOINT"
        )


@contextlib.contextmanager
def endpoint_for(
    reads: Iterable[str | Path],
    *,
    writes: Iterable[str | Path] = (),
    endpoint: str | None,
    embedded_dir: Path | None = None,
    etl_function: str | None = None,
) -> Iterator[str | None]:
    """Yield an endpoint that answers if one of the URLs is read through AIStore, else the given one; see `cluster`.

    Without an endpoint, the embedded node's folder must hold the buckets of ``reads``; those of ``writes`` may be new.

    Raises:
        StoreError: If nothing answers there; or if the embedded node's folder lacks a bucket: names the buckets that it
            holds. Then no node is started.
        ValueError: If no endpoint is given, and some URLs are in AIStore and others in a cloud's own buckets.
    """
    read, written = list(reads), list(writes)
    in_cluster = [url for url in (*read, *written) if is_in_cluster(url, endpoint)]
    if not in_cluster:
        yield endpoint
        return
    if endpoint == DIRECT:
        raise ValueError(
            f"'{in_cluster[0]}' is in a bucket of AIStore, and the endpoint is '{DIRECT}': name the cluster's"
        )
    if endpoint is None:
        others = [url for url in (*read, *written) if is_remote(url) and url not in in_cluster]
        if others:
            raise ValueError(
                f"'{in_cluster[0]}' is in AIStore, '{others[0]}' is not, and no AIStore endpoint is given; set "
                "AIS_ENDPOINT to a cluster that has the cloud's bucket as a backend, or go by a directory"
            )
        for url in read:
            if is_remote(url):
                _check_embedded_bucket(url, embedded_dir or default_embedded_dir())
    with cluster(endpoint, embedded_dir=embedded_dir, etl_function=etl_function) as answering:
        yield answering


@contextlib.contextmanager
def cluster(
    endpoint: str | None, *, embedded_dir: Path | None = None, etl_function: str | None = None
) -> Iterator[str]:
    """Yield an endpoint that answers, or raise a `StoreError`.

    Args:
        endpoint: A cluster's proxy, or several with commas between them, of which one must be healthy now: it comes
            first in the endpoint that is yielded. ``None`` starts the embedded node on loopback, in a
            process of its own, and stops it at the end: for first runs, tests and laptops, not for several machines.
        embedded_dir: The embedded node's folder; ``None`` for `default_embedded_dir`.
        etl_function: The one transform that the embedded node may run; ``None`` for none.
    """
    if endpoint is not None:
        yield check_endpoint(endpoint)
        return
    directory = embedded_dir or default_embedded_dir()
    with embedded_node.start(directory, etl_function=etl_function) as node:
        _log.info("no AIS_ENDPOINT: embedded AIS node at %s, storing into %s", node.endpoint, directory)
        yield node.endpoint


def _check_embedded_bucket(url: str | Path, folder: Path) -> None:
    scheme, _, rest = str(url).partition("://")
    bucket, found = split_bucket(rest)[0], embedded_node.bucket_names(folder)
    if bucket in found:
        return
    raise StoreError(
        f"no bucket '{scheme}://{bucket}': AIS_ENDPOINT is not set, and the embedded node's folder '{folder}' holds no "
        f"such bucket (found: {shown(found) if found else 'none'}); set AIS_ENDPOINT, or make the bucket: "
        f"dali-pipes prep pack ... {scheme}://{bucket}"
    )


def default_embedded_dir() -> Path:
    """``$XDG_DATA_HOME/dali-pipes/embedded``, where the buckets of one command stay for the next one."""
    data_home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data_home) / "dali-pipes" / "embedded"
