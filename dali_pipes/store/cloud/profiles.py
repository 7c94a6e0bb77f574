"""Credentials of AWS's profiles: files, single sign-on, assumed roles and programs that print credentials."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from dali_pipes.errors import keep_secret


class ProfileCredentials:
    """A provider of credentials for `obstore`, which calls it from a thread of its own when it signs.

    boto3 reads the profiles. It keeps what it has read, and refreshes credentials that have an end. This class asks
    boto3 again after half of the time that is left, and after `renew` it reads the profiles anew. ``open_session`` is
    ``boto3.Session``. Any thread may use it.

    Raises:
        ValueError: If the profiles have no credentials.
    """

    def __init__(self, open_session: Callable[[], Any]) -> None:
        self._open_session = open_session
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}
        self._ends_at = self._ask_at = self._renewed_at = 0.0
        self._source: Any = None
        self._open()

    def __call__(self) -> dict[str, Any]:
        with self._lock:
            if time.time() >= self._ask_at:
                self._ask()
            # Without an end in the past, `obstore` would keep refused credentials until their true end.
            return {**self._known, "expires_at": datetime.now(UTC)}

    @property
    def left_s(self) -> float:
        """Seconds until the credentials end that were given last; infinite if they do not say so."""
        return self._ends_at - time.time()

    def renew(self, *, at_once: bool = False) -> None:
        """Read the profiles again, because a server has refused the credentials: ``at_once``, or once a second."""
        with self._lock:
            if at_once or time.monotonic() >= self._renewed_at + 1.0:
                self._source = None
                self._ask_at = 0.0

    def _open(self) -> None:
        session = self._open_session()
        self.config = {} if session.region_name is None else {"region": session.region_name}  # read by `obstore`
        self._source = session.get_credentials()
        if self._source is None:
            raise ValueError("they have none")
        self._renewed_at = time.monotonic()

    def _ask(self) -> None:
        if self._source is None:
            self._open()
        found = self._source.get_frozen_credentials()
        for secret in (found.secret_key, found.token):
            keep_secret(secret or "")
        self._known = {"access_key_id": found.access_key, "secret_access_key": found.secret_key, "token": found.token}
        # botocore has no public name for it, and `None` for credentials that say nothing of their end.
        ends = getattr(self._source, "_expiry_time", None)
        self._ends_at = ends.timestamp() if ends else float("inf")
        now = time.time()
        self._ask_at = now + (self._ends_at - now) / 2
