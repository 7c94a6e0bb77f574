"""Answers of clouds and web servers: whether they are an object's bytes, and what follows if not.

A store of a cloud finds the credentials and signs; here are only requests that are signed already. A signature ends
after some time, and so do the credentials with which it was made. So an object is signed for anew when its signature is
old, and when it is refused: a run of days needs no more than a store whose credentials are refreshed.
"""

import re
import time
from collections.abc import Callable
from html import unescape
from typing import NamedTuple

from dali_pipes.errors import DataError, StoreError, printable
from dali_pipes.store.cloud.settings import CloudSettings
from dali_pipes.store.http.answers import (
    INDEX_ANEW,
    FaultError,
    MissingObjectError,
    NoRangesError,
    ObjectPart,
    ObjectRequest,
    ObjectSource,
    Version,
    WantedObject,
)
from dali_pipes.store.http.client import HttpAccess
from dali_pipes.store.http.rules import REDIRECTS, answer_text, is_passing, retry_after_s
from dali_pipes.store.http.wire import Answer
from dali_pipes.store.shard_set import missing_advice

# A signature is not used in its last part: the request must arrive, and clocks differ.
_USED_SHARE = 0.8
_REFUSED = (401, 403)
# The server does not know the credentials, or no longer: new ones may be good.
_STALE_CODES = ("ExpiredToken", "TokenRefreshRequired", "InvalidToken", "InvalidTokenId", "InvalidAccessKeyId")
# With status 400 in place of 403.
_REFUSED_CODES = (*_STALE_CODES, "AuthorizationQueryParametersError")
# With a status that says nothing of it. In the last two, the bytes that arrived are not those that were signed.
_PASSING_CODES = (
    "RequestTimeout", "SlowDown", "ServerBusy", "Throttling", "ThrottlingException", "InternalError",
    "XAmzContentSHA256Mismatch", "BadDigest",
)  # fmt: skip
_NO_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound")
_ADVICE = {
    "RequestTimeTooSkewed": "the clock of this machine is wrong: set it (NTP)",
    "InvalidObjectState": "it is archived: restore it first, or change its storage class",
    "BlobArchived": "it is archived: move it to another access tier first",
    "SignatureDoesNotMatch": "the secret key is not the one that belongs to the access key",
    "InvalidAccessKeyId": "the access key does not exist there: does the endpoint belong to it?",
}
_IF_MATCH = "If-Match"
CHAINS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE, ~/.aws), a web identity, the role of "
    "the machine; for public data set AWS_SKIP_SIGNATURE=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT, `gcloud auth application-default login`, the "
    "account of the machine; for public data set GOOGLE_SKIP_SIGNATURE=true",
    "az": "AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or "
    "AZURE_STORAGE_SAS_TOKEN, AZURE_CLIENT_ID, the identity of the machine; for public data set "
    "AZURE_SKIP_SIGNATURE=true",
}
ADDRESSES = {
    "s3": "set AWS_ENDPOINT_URL for a server that is not Amazon's",
    "gs": "set GOOGLE_BASE_URL or STORAGE_EMULATOR_HOST for a server that is not Google's",
    "az": "set AZURE_STORAGE_ENDPOINT for a server that is not Microsoft's",
}
# Parts of the text of `obstore`'s errors: the status, and in the debugging part what the system said of a connection.
_STATUS = re.compile(r"status code: (\d{3})")
_CAUSE = re.compile(r"^\s*(?:message|error): \"([^\"\n]+)\",$", re.MULTILINE)
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_UNTRUSTED = "certificate cannot be trusted"


class NoBucketError(MissingObjectError):
    """The server has no such bucket."""


class Refusal(NamedTuple):
    """What a server answered instead of doing what it was asked."""

    status: int
    """HTTP's status; 0 if nothing answered."""
    code: str
    """The cloud's own word, such as ``NoSuchKey``; may be empty."""
    said: str
    region: str = ""
    """The region in which the bucket is, if the server named it."""

    @classmethod
    def of_text(cls, status: int, text: str, *, code: str = "", reason: str = "", region: str = "") -> "Refusal":
        """Read the elements of an error in XML; other texts are the message themselves."""
        code = _element(text, "Code") or code
        said = _element(text, "Message") or ("" if code or "<" in text else text)
        region = region or _element(text, "Region")
        # A value that is not a region's name is left out: errors repeat it as a setting.
        region = region if re.fullmatch(r"[a-z0-9-]{1,40}", region) else ""
        return cls(status, printable(code), printable(" ".join(said.split()) or reason), region)

    @classmethod
    def of_error(cls, exc: BaseException) -> "Refusal":
        """Read what `obstore`'s error says; of the debugging part, with whole requests, only the system's words."""
        text, _, debugging = str(exc).partition("\n\nDebug source:")
        if status := _STATUS.search(text):
            return cls.of_text(int(status[1]), text if "<" in text else text[status.end() :])
        # The last is the nearest to the cause: "Connection refused".
        cause = ": ".join([text.rpartition(" - ")[2] or type(exc).__name__, *_CAUSE.findall(debugging)[-1:]])
        if "InvalidContentType" in debugging:
            cause += ": the server does not speak TLS (its address begins with http://)"
        if wrong := _CERTIFICATE.search(debugging):
            cause += f": its {_UNTRUSTED} ({wrong[1]}); set SSL_CERT_FILE to the file of the CA"
        return cls(404 if isinstance(exc, FileNotFoundError) else 0, "", printable(cause))

    def __str__(self) -> str:
        text = f"{self.code}: {self.said}" if self.code else self.said
        return f"{self.status} {text}" if self.status else text

    @property
    def is_stale(self) -> bool:
        """Whether the credentials have ended. S3 refuses rights by another code."""
        return self.code in _STALE_CODES

    @property
    def is_unclear(self) -> bool:
        """Whether the credentials may have ended: the answer to a HEAD has no code."""
        return self.status == 400 and not self.code

    @property
    def is_passing(self) -> bool:
        """Whether another attempt may succeed: the server is away, or asks for a pause."""
        if self.status:
            return is_passing(self.status) or self.code in _PASSING_CODES
        return not any(text in self.said for text in ("not supported", _UNTRUSTED))


def refused(settings: CloudSettings, where: str, refusal: Refusal) -> StoreError:
    """The error for a request of `obstore` that was refused."""
    at = f"'{where}' at {settings.origin}"
    if refusal.code in _NO_BUCKET_CODES:
        text = f"no bucket '{settings.url}' at {settings.origin} ({refusal}); make it first, or check its name"
        return NoBucketError(text, said=str(refusal), is_bucket=True)
    if refusal.status == 404:
        return MissingObjectError(f"no object {at} ({refusal})", said=str(refusal))
    advice = ""
    if refusal.region:
        advice = f"; the bucket is in another region: set AWS_REGION={refusal.region}"
    elif settings.scheme == "s3" and (refusal.status in REDIRECTS or "Region" in refusal.code):
        advice = "; the bucket is in another region: set AWS_REGION to it"
    elif (refusal.status in _REFUSED or refusal.is_stale or refusal.is_unclear) and settings.scheme in CHAINS:
        advice = f"; credentials are looked for in this order: {CHAINS[settings.scheme]}"
    elif not refusal.status and refusal.is_passing:
        advice = f"; is it the right address? {ADDRESSES.get(settings.scheme, 'check the URL')}"
    return StoreError(f"{at}: {refusal}{advice}")


class CloudObjects(ObjectSource):
    """The objects of a cloud's bucket, or below a web server's URL.

    ``ask_for`` returns the signed request for an object's name, from any thread. It raises `StoreError` if there are no
    credentials, `OSError` if their source does not answer now. ``locate`` returns an object's URL; ``advice`` says what
    to do if the credentials are refused, ``address`` if nobody answers.
    """

    def __init__(
        self,
        ask_for: Callable[[str], ObjectRequest],
        *,
        locate: Callable[[str], str],
        access: HttpAccess,
        service: str,
        advice: str = "",
        address: str = "check the URL",
    ) -> None:
        super().__init__(access)
        self._ask_for, self._locate, self._advice, self._address = ask_for, locate, advice, address
        self.service = service
        self.question = f"is {service} well, and the network between?"
        self.is_accepted = False  # whether credentials have worked

    def where(self, name: str) -> str:
        return self._locate(name)

    def renews(self, refusal: Refusal) -> bool:
        """Whether a refused request may succeed: credentials that have worked have ended, and are read anew."""
        return False

    def request(self, part: ObjectPart) -> ObjectRequest:
        """The signed request. What comes after the first bytes must be of the same version of the object."""
        item = part.item
        if item.signed is None or time.monotonic() >= item.signed_until:
            try:
                item.signed = self._ask_for(item.name)
            except OSError as exc:
                raise FaultError(f"cannot sign a request for it: {exc}", is_away=True) from exc
            item.signed_until = time.monotonic() + _USED_SHARE * item.signed.expires_s
            item.target = None
        headers = item.signed.headers if item.target is None else ()
        etag = item.version.version if item.version and (part.is_range or part.position) else ""
        if etag.startswith('"'):  # a weak one matches nothing
            headers = (*headers, (_IF_MATCH, etag))
        return ObjectRequest(item.target or item.signed.url, headers)

    def version_of(self, answer: Answer) -> Version:
        """The ETag. It is a checksum of the bytes only sometimes, so it is not compared with them.

        A web server without ETags may say when the file was changed.
        """
        return Version(answer.headers.get("ETag") or answer.headers.get("Last-Modified"))

    def check_head(self, part: ObjectPart, answer: Answer) -> None:
        """See `ObjectSource.check_head`; also refuses an object that Google Cloud Storage unpacks on the way."""
        part.item.num_refused = 0
        self.is_accepted = True
        stored = answer.headers.get("X-Goog-Stored-Content-Encoding", "identity")
        encoding = answer.headers.get("Content-Encoding", "identity")
        if stored != "identity" and encoding in ("", "identity"):
            raise DataError(
                f"'{part.item.where}' is stored with the Content-Encoding '{printable(stored)}', and {self.service} "
                "unpacks it on the way; upload it without (gcloud storage cp without -Z, gsutil cp without -z)"
            )
        try:
            super().check_head(part, answer)
        except DataError as exc:
            if encoding in ("", "identity"):
                raise
            raise DataError(
                f"{exc}; it came with the Content-Encoding '{printable(encoding)}': shards must be stored and sent "
                "without one"
            ) from None

    def refusal(self, part: ObjectPart, asked: ObjectRequest, answer: Answer, body: bytes) -> Exception:
        """See `ObjectSource.refusal`. A refused request is signed again: once, or until new credentials are taken."""
        self.has_answered = True
        item = part.item
        refusal = Refusal.of_text(
            answer.status,
            body.decode(errors="replace"),
            code=answer.headers.get("X-Ms-Error-Code"),
            reason=answer.reason,
            region=answer.headers.get("X-Amz-Bucket-Region"),
        )
        status, code = answer.status, refusal.code
        text = str(refusal) if code else answer_text(status, refusal.said, reason=answer.reason)
        told = f"{item.address}: {text}"
        self._check_refused_range(item, answer)
        if status == 412:  # of another version than the first
            if part.is_stream:
                return item.replaced_meanwhile()
            if part.is_range:
                return NoRangesError("it was replaced while it was read (412)")
            part.restart()
            item.version = None
            return FaultError("it was replaced while it was read (412)", is_fruitless=True)
        if refusal.is_passing:
            return FaultError(text, retry_after_s=retry_after_s(answer.headers), is_away=True)
        if refusal.region and status in (400, *REDIRECTS):
            return StoreError(
                f"{item.address}: {status}: the bucket is in the region '{refusal.region}'; set "
                f"AWS_REGION={refusal.region}, and an endpoint of this region if AWS_ENDPOINT_URL names one"
            )
        if status in _REFUSED or code in _REFUSED_CODES:
            # Another range of the object may have noted it already.
            if item.signed is not None and asked.url in (item.signed.url, item.target):
                item.signed = None
                item.num_refused += 1
            if self.renews(refusal):
                return FaultError(text, is_away=True)
            if item.num_refused < 2:
                return FaultError(text, is_fruitless=True)
            advice = [known for known in (_ADVICE.get(code), self._advice) if known]
            if status == 403 and code in ("", "AccessDenied"):
                advice.append("an object that is missing is refused in the same way where the bucket may not be listed")
            return StoreError("; ".join([told, *advice]))
        if code in _NO_BUCKET_CODES:
            text = f"{told}; is it the right name, endpoint and account?"
            return MissingObjectError(text, said=code, is_bucket=True)
        if status in (404, 410):
            advice_ = INDEX_ANEW if item.name.endswith(".safetensors") else missing_advice()
            return MissingObjectError(f"{told}; was it deleted? {advice_}", said=text)
        return StoreError(told)

    def nobody_there(self, item: WantedObject, fault: FaultError) -> StoreError:
        return StoreError(f"{item.address}: {fault}; is it the right address? {self._address}")


def _element(text: str, name: str) -> str:
    """The text of the first XML element of a name; no parser, which would have to be safe against hostile texts."""
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return unescape(found[1]).strip() if found else ""
