"""Send requests to one bucket of a cloud, by `obstore`: wait while the server is away, and name its errors."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from dali_pipes.errors import StoreError
from dali_pipes.store.cloud.errors import CHAINS, refusal_of, refused
from dali_pipes.store.cloud.settings import CloudSettings
from dali_pipes.store.patience import Patience, PatienceOverError, Waiting, pause

if TYPE_CHECKING:
    from dali_pipes.store.cloud.settings import ObstoreStore

T = TypeVar("T")

# Where a machine in a cloud asks for its credentials. No other machine has such a server, and no wait mends that.
_METADATA_SERVERS = ("169.254.", "metadata.google")


# `obstore` answers no request in a child that is forked after it began: its threads stay in the parent.
_is_begun = False
_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = _is_begun


os.register_at_fork(after_in_child=_note_fork)


class CloudClient:
    """One bucket and the patience with it. It pickles; any thread may use it."""

    def __init__(self, settings: CloudSettings, patience: Patience) -> None:
        self.settings, self.patience = settings, patience
        self._has_answered = False

    def __reduce__(self) -> tuple[Any, ...]:
        return CloudClient, (self.settings, self.patience)

    @property
    def store(self) -> "ObstoreStore":
        """`obstore`'s store.

        Raises:
            StoreError: If this process was forked from one that used `obstore`: a request would wait forever.
        """
        global _is_begun
        if _is_forked:
            settings = self.settings
            raise StoreError(
                f"'{settings.scheme}://{settings.bucket}' is used in a forked process, and its parent has used a cloud "
                "before; start the process by 'spawn' or 'forkserver' (multiprocessing_context= of torch's DataLoader)"
            )
        _is_begun = True
        return self.settings.opened

    @contextlib.contextmanager
    def asking(self, where: str) -> Iterator[None]:
        """Turn `obstore`'s errors into a `StoreError`."""
        from obstore.exceptions import BaseError

        try:
            yield
        except PatienceOverError as exc:
            raise StoreError(f"'{where}' at {self.settings.origin}: {exc}") from None
        except (BaseError, FileNotFoundError) as exc:
            raise refused(self.settings, where, refusal_of(exc)) from None

    def send(self, where: str, request: Callable[[], T]) -> T:
        """Send a request until the server has done it, or refuses it, or the patience is at its end: a `StoreError`."""
        self.store  # noqa: B018 (opened first: a missing package has an error of its own)
        with self.asking(where):
            return self.attempt(request)

    def find(self, where: str, request: Callable[[], T]) -> T | None:
        """As `send`, but ``None`` if there is no such object or bucket."""
        self.store  # noqa: B018
        with self.asking(where):
            try:
                return self.attempt(request)
            except FileNotFoundError:
                return None

    def attempt(self, request: Callable[[], T], waiting: Waiting | None = None) -> T:
        """Send a request until the server does it or refuses it.

        Raises:
            obstore.exceptions.BaseError, FileNotFoundError: What the server refused.
            PatienceOverError: If it was away for too long.
        """
        from obstore.exceptions import BaseError

        waiting = waiting or Waiting(self.patience, self.settings.origin, service=self.settings.cloud)
        while True:
            try:
                result = request()
            except (BaseError, FileNotFoundError) as exc:
                refusal = refusal_of(exc)
                self._has_answered |= bool(refusal.status)
                if not refusal.is_passing:
                    raise
                self._check_credentials(exc)
                pause_s = waiting.next_pause_s(refusal.text, has_answered=self._has_answered)
                if pause_s is None:
                    if waiting.num_failures:
                        raise waiting.over(refusal.text) from None
                    raise
                pause(pause_s)
            else:
                self._has_answered = True
                waiting.progress()
                return result

    def _check_credentials(self, exc: Exception) -> None:
        if any(server in str(exc) for server in _METADATA_SERVERS):
            settings = self.settings
            raise StoreError(
                f"no credentials for '{settings.scheme}://{settings.bucket}'; they are looked for in this order: "
                f"{CHAINS[settings.scheme]}"
            ) from None
