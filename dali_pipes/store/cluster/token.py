"""The token with which a client of AIStore's AuthN shows who it is."""

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dali_pipes.errors import StoreError, keep_secret

VARIABLE = "AIS_AUTHN_TOKEN"
FILE_VARIABLE = "AIS_AUTHN_TOKEN_FILE"
LOGIN_FILE = ".config/ais/cli/auth.token"
"""The file that ``ais auth login`` writes, below the home directory."""
_MAX_FILE_BYTES = 1 << 20
# Files with tokens that a cluster has accepted in this process.
_accepted: set[Path] = set()


@dataclass(frozen=True)
class Token:
    """A token, as text or in a file. A file is read for each request, so that tokens can be rotated.

    It can be pickled. The text is in no `repr`, so that no log and no traceback shows it; and no text of a server
    that repeats it, see `dali_pipes.errors.keep_secret`.
    """

    text: str = field(default="", repr=False)
    """The token; empty if it is in ``file``."""
    file: Path | None = None
    """A file with the token alone, or with ``{"token": ...}``, as ``ais auth login`` writes it."""
    _last: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """The token that was last read from the file; empty before."""

    def __post_init__(self) -> None:
        if self.file is None:
            _check(self.text, f"is {VARIABLE} complete?")

    @classmethod
    def from_environment(cls) -> "Token | None":
        """Find the token as AIStore's own command line does.

        ``AIS_AUTHN_TOKEN`` is the token; else ``AIS_AUTHN_TOKEN_FILE`` names the file; else the file counts which
        ``ais auth login`` writes, ``~/.config/ais/cli/auth.token``, if it is there.

        Raises:
            StoreError: If ``AIS_AUTHN_TOKEN`` cannot be a token.
        """
        if text := os.environ.get(VARIABLE):
            try:
                return cls(text)
            except ValueError as exc:
                raise StoreError(str(exc)) from None
        if named := os.environ.get(FILE_VARIABLE):
            return cls(file=Path(named))
        with contextlib.suppress(OSError, RuntimeError):
            written = Path.home() / LOGIN_FILE
            if written.is_file():
                return cls(file=written)
        return None

    def current(self) -> str:
        """The token as it is now.

        Raises:
            StoreError: If the file cannot be read, or does not hold a token, and held none before. While a file is
                being replaced, the token that it held counts.
        """
        if self.file is None:
            keep_secret(self.text)  # in a process that unpickled it, too
            return self.text
        try:
            self._last[:] = [_token_in(self.file)]
        except (OSError, ValueError) as exc:
            if not self._last:
                reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
                raise StoreError(
                    f"cannot read the token file '{self.file}': {reason}; log in anew (ais auth login), or set "
                    f"{FILE_VARIABLE} or {VARIABLE}"
                ) from exc
        return self._last[0]

    def note_accepted(self) -> None:
        """Remember that the cluster has accepted this token, or an earlier one of the same file."""
        if self.file is not None:
            _accepted.add(self.file)

    def is_replaced_soon(self, status: int, text: str) -> bool:
        """Whether an answer says that the token has expired, and its file will be replaced: others were accepted."""
        return status == 401 and "token expired" in text and self.file in _accepted

    @property
    def source(self) -> str:
        """Where the token comes from, for messages."""
        return VARIABLE if self.file is None else f"the file '{self.file}'"

    def __getstate__(self) -> dict[str, Any]:
        return {"text": self.text, "file": self.file, "_last": []}


def is_token_for(endpoint: str, url: str) -> bool:
    """Whether a request for ``url`` carries the endpoint's token.

    Only the same scheme, host and port get it, and the host's usual port for TLS in place of that without.

    A target has another address; it trusts the proxy's redirect.

    >>> is_token_for("https://ais:51080", "https://ais:51080/v1/objects/b/o")
    True
    >>> is_token_for("https://ais:51080", "https://ais:51081/v1/objects/b/o")
    False
    """
    named, asked = (
        (parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        for parts in map(urlsplit, (endpoint, url))
    )
    host = named[1]
    return named == asked or (named == ("http", host, 80) and asked == ("https", host, 443))


def _token_in(file: Path) -> str:
    """Read a token file; a ``ValueError`` says what is wrong with it, and never repeats its content."""
    with file.open("rb") as stream:
        data = stream.read(_MAX_FILE_BYTES)
    text = data.decode("utf-8", errors="replace").strip()
    if text.startswith("{"):
        try:
            value = json.loads(text)["token"]
        except (ValueError, KeyError, RecursionError):
            raise ValueError('it is JSON without a "token"') from None
        text = value if isinstance(value, str) else ""
    if not text:
        raise ValueError("it holds no token")
    _check(text, "is the file complete?")
    return text


def _check(text: str, advice: str) -> None:
    keep_secret(text)
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise ValueError(f"the token must have only printable ASCII characters; {advice}")


def refusal_advice(status: int, text: str, token: Token | None) -> str:
    """What to do about an answer 401 or 403, as the end of an error's text; empty for any other status.

    ``text`` is its message, ``token`` that of the request.
    """
    if status == 401:
        if token is None or "token required" in text:
            return f"; log in (ais auth login), or set {FILE_VARIABLE} or {VARIABLE}"
        state = "has expired" if "token expired" in text else "is not valid for this cluster"
        return f"; the token in {token.source} {state}: get a new one (ais auth login)"
    if status != 403 or "embedded node" in text:  # an embedded node knows no tokens, and says itself what to do
        return ""
    lacking = "the request has no token" if token is None else f"the token in {token.source} lacks a right"
    return f"; {lacking}: ask the cluster's administrator for it"
