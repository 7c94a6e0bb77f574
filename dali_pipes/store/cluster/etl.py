"""Check that an ETL of a cluster runs, and turn a cluster's answers about ETLs into errors that say what to do."""

import contextlib
import logging
from collections.abc import Iterator

from dali_pipes.errors import StoreError, shown
from dali_pipes.store.base import Bucket
from dali_pipes.store.messages import error_text, message_of

_log = logging.getLogger(__name__)

# The stage of an ETL that can be read through, and all stages that a cluster knows.
_RUNNING = "Running"
_STAGES = (_RUNNING, "Initializing", "Aborted", "Unknown")


class NoEtlError(StoreError):
    """The cluster cannot run any ETL."""


def check_running(store: Bucket, name: str) -> None:
    """Refuse an ETL that is missing, or does not run, before anything is read through it.

    ``store`` is any bucket of the cluster. If the cluster lists its ETLs to administrators only, nothing is refused,
    and the first read will fail.

    Raises:
        NoEtlError: If the cluster cannot have ETLs.
        StoreError: If the ETL does not run; names the ETLs that run.
        ValueError: If the name is not valid.
    """
    from aistore.sdk.errors import AISError

    store.client.etl(name)  # raises ValueError
    with asking_etl(store, name):
        try:
            stages = {etl.id: etl.stage for etl in store.client.cluster().list_etls(stages=_STAGES)}
        except AISError as exc:
            if exc.status_code in (401, 403):
                _log.debug("ETL '%s': not known before it is used, %s does not list them", name, store.endpoint)
                return
            raise
    if stages.get(name) == _RUNNING:
        return
    others = sorted(other for other, stage in stages.items() if stage == _RUNNING)
    found = f"found: {shown(others)}" if others else "none runs"
    if name in stages:
        raise StoreError(
            f"ETL '{name}' at {store.endpoint} does not run, its stage is {stages[name]} ({found}); stop it and "
            f"{how_to_start(name)}"
        )
    raise StoreError(f"no ETL '{name}' at {store.endpoint} ({found}); {how_to_start(name)}")


def how_to_start(name: str) -> str:
    """The advice at the end of a message."""
    return f"start it: dali-pipes prep etl start {name} --function ..."


@contextlib.contextmanager
def asking_etl(store: Bucket, name: str, *, shard: str | None = None) -> Iterator[None]:
    """The same as `Bucket.asking`; the errors of a missing ETL, and of a cluster without ETLs, also say what to do."""
    from aistore.sdk.errors import AISError

    where = store.locate(shard) if shard else f"ETL {name}"
    with store.asking(where):
        try:
            yield
        except AISError as exc:
            text = error_text(exc)
            if (none := no_etl(store.endpoint, exc.status_code, text)) is not None:
                raise none from None
            is_about_it = shard is None and exc.status_code == 404 and name in text
            if is_about_it or is_unknown_etl(exc.status_code, text, name=name):
                text = f"no ETL '{name}' at {store.endpoint} ({text}); {how_to_start(name)}"
                raise StoreError(text) from None
            if exc.status_code == 422:
                reason = message_of(exc.message) or "no reason given"
                raise StoreError(f"'{where}' at {store.endpoint}: ETL '{name}' failed: {reason}") from None
            raise


def is_unknown_etl(status: int, text: str, *, name: str) -> bool:
    """Whether an answer means that the ETL does not exist or does not run."""
    # The name alone proves nothing: the name of a missing shard may contain it.
    return status == 404 and f"{name} does not exist - try" in text


def no_etl(endpoint: str, status: int, text: str) -> NoEtlError | None:
    """The error of a cluster that cannot have ETLs, or ``None`` if an answer's status and text mean something else."""
    if status == 400 and "kubernetes" in text.lower():  # AIS 4.9, in two ways
        cause = "it does not run on Kubernetes, whose pods run transforms"
    elif status == 501:  # AIS 5.0 that is built without the tag; or the embedded node
        cause = "an AIStore on Kubernetes, built with the tag etl, has it"
    else:
        return None
    return NoEtlError(
        f"no ETL at {endpoint}: {text}; {cause} (deploy/etl/README.md). The same from here, with no ETL: "
        "dali-pipes prep transform URL OUT --function ..."
    )
