"""One bucket of a cloud: `obstore` lists, signs, writes and deletes, and our client reads what it has signed."""

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote, urlencode

from dali_pipes.errors import StoreError, printable
from dali_pipes.store.cloud.objects import CloudObjects
from dali_pipes.store.cloud.settings import STALL_S, CloudSettings
from dali_pipes.store.entries import SERVERS, ObjectEntry
from dali_pipes.store.http.answers import ObjectRequest
from dali_pipes.store.http.client import HttpAccess
from dali_pipes.store.http.objects import ObjectFetcher, ObjectFile, RetryPolicy
from dali_pipes.store.patience import Patience, PatienceOverError, Waiting, pause

if TYPE_CHECKING:
    from dali_pipes.store.cloud.settings import ObstoreStore


_VERSION = "2023-11-03"


def azure_url(settings: CloudSettings, name: str, signed_for: timedelta) -> str | None:
    """The URL that brings an object's bytes; ``None`` if `obstore` signs it, as it does without an account's key.

    Raises:
        StoreError: If the key is not base64, or there is none and `obstore` would sign the name wrongly.
    """
    options, plain = settings.options, settings.plain_url(name)
    if sas := options.get("azure_storage_sas_token") or options.get("azure_storage_sas_key"):
        return f"{plain}?{sas.lstrip('?')}"
    key = options.get("azure_storage_account_key") or options.get("azure_storage_access_key")
    account = options.get("azure_storage_account_name")
    if key and account:
        return f"{plain}?{_signature(settings, name, account=account, key=key, signed_for=signed_for)}"
    # obstore signs the quoted name, and Azure checks the plain one.
    if quote(name, safe="/-_.~") != name:
        raise StoreError(
            f"'az://{settings.bucket}/{name}': a name with spaces, signs or letters beyond ASCII can be read with "
            "an account's key or an access signature only; set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, "
            "or rename the object"
        )
    return None


def _signature(settings: CloudSettings, name: str, *, account: str, key: str, signed_for: timedelta) -> str:
    """The fields of a service signature of one blob, for reading."""
    until = (datetime.now(UTC) + signed_for).strftime("%Y-%m-%dT%H:%M:%SZ")
    blob = f"/blob/{account}/{settings.bucket}/{name}"
    # Rights, start, end, blob, policy, address, protocol, version, kind; then seven fields that are not used.
    text = "\n".join(["r", "", until, blob, "", "", "", _VERSION, "b", *[""] * 7])
    try:
        digest = hmac.new(base64.b64decode(key, validate=True), text.encode(), hashlib.sha256).digest()
    except binascii.Error:
        raise StoreError(f"cannot sign for 'az://{settings.bucket}': the account's key is not base64") from None
    return urlencode({"sp": "r", "se": until, "sv": _VERSION, "sr": "b", "sig": base64.b64encode(digest).decode()})


_STATUS = re.compile(r"status code: (\d{3})[^:\n]*(?:: )?")
_CODE = re.compile(r"<Code>([^<]*)</Code>|\"code\":\s*\"?([A-Za-z0-9]+)")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>|\"message\":\s*\"([^\"]*)\"")
# In the debugging part: what the system said when there was no connection.
_CAUSE = re.compile(r"^\s*(?:message|error): \"([^\"\n]+)\",$", re.MULTILINE)
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_UNTRUSTED = "certificate cannot be trusted"
_REGION = re.compile(r"<Region>([^<]+)</Region>")
# 408: the server waited for the client. 425, 429: too early, too many.
_PASSING = (408, 425, 429)
# The bytes that arrived are not those whose SHA-256 the request was signed with: they broke on the way.
_BROKEN = ("XAmzContentSHA256Mismatch", "BadDigest")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
CHAINS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE, ~/.aws), a web identity, the role of "
    "the machine; for public data set AWS_SKIP_SIGNATURE=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT, `gcloud auth application-default login`, the "
    "account of the machine; for public data set GOOGLE_SKIP_SIGNATURE=true",
    "az": "AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or "
    "AZURE_STORAGE_SAS_TOKEN, AZURE_CLIENT_ID, the identity of the machine; for public data set "
    "AZURE_SKIP_SIGNATURE=true",
}


class NoBucketError(StoreError):
    """The server has no such bucket."""


@dataclass(frozen=True)
class Refusal:
    """What a server answered instead of the object."""

    status: int
    """HTTP's status; 0 if nothing answered."""
    code: str
    """The cloud's own word, such as ``NoSuchKey``; may be empty."""
    text: str
    """Status, code and message, in one line."""
    region: str = ""
    """The region in which the bucket is, if the server named it."""

    @property
    def is_passing(self) -> bool:
        """Whether another attempt may succeed: the server is away, or asks for a pause."""
        is_away = self.status >= 500 or self.status in _PASSING or (not self.status and not self.is_unable)
        return is_away or self.code in _BROKEN

    @property
    def is_unable(self) -> bool:
        """Whether `obstore` or the server cannot do this at all: a wait mends nothing."""
        return not self.status and any(text in self.text for text in ("not supported", _UNTRUSTED))

    @property
    def is_missing(self) -> bool:
        """Whether there is no such object or bucket."""
        return self.status == 404

    @property
    def is_no_bucket(self) -> bool:
        return self.code in _NO_BUCKET


def refusal_of(exc: BaseException) -> Refusal:
    """Read what `obstore`'s error says; of the debugging part, with whole requests, only the system's words."""
    text = str(exc).partition("\n\nDebug source:")[0]
    status = _STATUS.search(text)
    code, message = (_first_group(pattern, text) for pattern in (_CODE, _MESSAGE))
    region = _REGION.search(text)
    if status is None:
        # The last is the nearest to the cause: "Connection refused".
        below = _CAUSE.findall(str(exc))
        cause = ": ".join([text.rpartition(" - ")[2] or type(exc).__name__, *below[-1:]])
        if "InvalidContentType" in str(exc):
            cause += ": the server does not speak TLS (its address begins with http://)"
        if wrong := _CERTIFICATE.search(str(exc)):
            cause += f": its {_UNTRUSTED} ({wrong[1]}); set SSL_CERT_FILE to the file of the CA"
        return Refusal(404 if isinstance(exc, FileNotFoundError) else 0, "", printable(cause, max_chars=300))
    # Azure's message goes on with the numbers of the request.
    said = " ".join(filter(None, [status[1], "" if code.isdigit() else code, message.partition("\n")[0]]))
    return Refusal(int(status[1]), code, printable(said, max_chars=500), region[1] if region else "")


def _first_group(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return next(filter(None, found.groups()), "") if found else ""


def refused(settings: "CloudSettings", where: str, refusal: Refusal) -> StoreError:
    """The error for the user."""
    at = f"'{where}' at {settings.origin}"
    if refusal.is_no_bucket:
        bucket = f"'{settings.scheme}://{settings.bucket}' at {settings.origin}"
        return NoBucketError(f"no bucket {bucket} ({refusal.text}); make it first, or check its name")
    if refusal.is_missing:
        return StoreError(f"no object {at} ({refusal.text})")
    advice = ""
    if refusal.region or refusal.status in (301, 307) or "Region" in refusal.code:
        named = f"AWS_REGION={refusal.region}" if refusal.region else "AWS_REGION to the bucket's region"
        advice = f"; the bucket is in another region: set {named}"
    elif refusal.status in (401, 403) and settings.scheme in CHAINS:
        advice = f"; credentials are looked for in this order: {CHAINS[settings.scheme]}"
        if refusal.status == 403 and settings.scheme == "s3":
            advice += ". Without the right s3:ListBucket, S3 answers 403 for objects that do not exist"
    elif not refusal.status and not refusal.is_unable:
        advice = f"; is it the right address? {ADDRESSES.get(settings.scheme, 'check the URL')}"
    return StoreError(f"{at}: {refusal.text}{advice}")


ADDRESSES = {
    "s3": "set AWS_ENDPOINT_URL for a server that is not Amazon's",
    "gs": "set GOOGLE_BASE_URL or STORAGE_EMULATOR_HOST for a server that is not Google's",
    "az": "set AZURE_STORAGE_ENDPOINT for a server that is not Microsoft's",
}


T = TypeVar("T")

WHOLE_BYTES = 16 << 20
"""An object of at most this size is written by one request, a larger one by parts of at least this size."""
# S3 takes 10,000 parts, and Azure 50,000.
_MAX_PARTS = 9_000
# An object's URL is asked for again long before it expires.
_SIGNED_FOR = timedelta(hours=1)
_USED_FOR_S = 45 * 60.0

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
    """One bucket and the patience with it: a `dali_pipes.store.base.StoreAccess`. Any thread may use it."""

    def __init__(self, settings: CloudSettings, patience: Patience) -> None:
        self.settings, self.patience = settings, patience
        self._has_answered = False

    def __reduce__(self) -> tuple[Any, ...]:
        return CloudClient, (self.settings, self.patience)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CloudClient) and (self.settings, self.patience) == (other.settings, other.patience)

    def __hash__(self) -> int:
        return hash(self.url)

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

    @property
    def url(self) -> str:
        """The bucket's URL."""
        return self.settings.url

    @cached_property
    def objects(self) -> ObjectFetcher:
        """Reads the bucket's objects; any thread may use it."""
        # Of another client: in a circle with this one, its connections would stay open until garbage is collected.
        return CloudClient(self.settings, self.patience).open_fetcher()

    def open_fetcher(self) -> ObjectFetcher:
        """A reader of the bucket's objects with connections of its own."""
        chain = CHAINS.get(self.settings.scheme)
        source = CloudObjects(
            self.request_for,
            locate=lambda name: f"{self.url}/{name}",
            access=HttpAccess.of_cloud(self.settings.origin),
            service=self.settings.cloud,
            advice=f"credentials are looked for in this order: {chain}" if chain else "",
            address=ADDRESSES.get(self.settings.scheme, "check the URL"),
        )
        return ObjectFetcher(source, retry=RetryPolicy(silence_s=STALL_S), patience=self.patience)

    def request_for(self, name: str) -> ObjectRequest:
        """The request that brings an object's bytes: a signed URL, or a plain one for public objects."""
        if self.settings.is_anonymous:
            return ObjectRequest(self.settings.plain_url(name))
        if self.settings.scheme == "az" and (url := azure_url(self.settings, name, _SIGNED_FOR)):
            return ObjectRequest(url, expires_s=_USED_FOR_S)
        store = cast("Any", self.store)
        import obstore

        signed = self.send(f"{self.url}/{name}", lambda: obstore.sign(store, "GET", name, _SIGNED_FOR))
        # Who pays (AWS_REQUEST_PAYER) is in the URL: S3 refuses fields x-amz-* that are not signed.
        return ObjectRequest(signed, expires_s=_USED_FOR_S)

    def file(self, name: str, *, size: int) -> ObjectFile:
        """See `dali_pipes.store.base.StoreAccess`."""
        return ObjectFile(self, name, size)

    def known_checksum(self, entry: ObjectEntry) -> None:
        """See `StoreAccess`: a listing has no checksum of the bytes. An ETag is none, if the object has parts."""

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """See `StoreAccess`. The object appears when its last part is there; before, nothing is seen of it."""
        import obstore

        where = f"{self.url}/{name}"
        if self.settings.scheme in SERVERS:
            raise StoreError(f"'{where}' is read by {self.settings.scheme}://, which writes nothing")
        errors: list[BaseException] = []

        def pieces() -> Iterator[bytes]:
            """The chunks, copied: a caller fills its buffer again. Its own errors come out of obstore as others."""
            num = 0
            try:
                for chunk in chunks():
                    num += chunk.nbytes
                    if num > num_bytes:
                        break
                    yield bytes(chunk)
                if num != num_bytes:
                    found = f"more than {num_bytes}" if num > num_bytes else str(num)
                    raise StoreError(
                        f"'{where}' is not written: expected {num_bytes} bytes, got {found}: did a file change while "
                        "it was read? run the command again"
                    )
            except GeneratorExit:
                raise
            except BaseException as exc:
                errors.append(exc)
                raise

        def put() -> None:
            if num_bytes <= WHOLE_BYTES:
                obstore.put(self.store, name, b"".join(pieces()), use_multipart=False)
                return
            part_bytes = max(WHOLE_BYTES, -(-num_bytes // _MAX_PARTS))
            obstore.put(self.store, name, pieces(), use_multipart=True, chunk_size=part_bytes, max_concurrency=2)

        try:
            self.send(where, put)
        except StoreError:
            if errors:
                raise errors[0] from None
            raise

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
                # A server that has answered a reader is away, and its address is right.
                self._has_answered |= "objects" in vars(self) and self.objects.source.has_answered
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
