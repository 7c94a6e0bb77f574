"""The SDK's sessions without the environment's proxies: for endpoints on this machine, which no proxy can reach.

Apart from `dali_pipes.store.ais`, because it imports the SDK, which takes half a second; a module's class, so that it pickles.
"""

from aistore.sdk.session_manager import SessionManager
from requests import Session

__all__ = ["DirectSessions"]


class DirectSessions(SessionManager):  # type: ignore[misc]  # the SDK publishes no types
    """One session a process, as the SDK's own, which connects directly."""

    @property
    def session(self) -> Session:
        """The session of this process; also one that was forked or started later."""
        session: Session = super().session
        # Redirects follow it too. What else it turns off: .netrc, and REQUESTS_CA_BUNDLE; AIS_CLIENT_CA still counts.
        session.trust_env = False
        return session
