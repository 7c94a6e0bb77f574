"""Sessions of the SDK that ignore the environment's proxies, because no proxy can reach an endpoint on this machine.

The class is not in `dali_pipes.store.cluster.ais`, because importing the SDK takes half a second. It stands at the top
level of a module so that it can be pickled.
"""

from aistore.sdk.session_manager import SessionManager
from requests import Session


class DirectSessions(SessionManager):  # type: ignore[misc]  # the SDK publishes no types
    """Like the SDK's own, one session for each process, but it connects directly."""

    @property
    def session(self) -> Session:
        """The process's session, also if the process was forked or started later."""
        session: Session = super().session
        # This also holds for redirects. It turns off .netrc and REQUESTS_CA_BUNDLE, too; AIS_CLIENT_CA still counts.
        session.trust_env = False
        return session
