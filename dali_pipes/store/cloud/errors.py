"""Turn errors of `obstore` into errors that say where, what the server said, and what to do."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dali_pipes.errors import StoreError, printable

if TYPE_CHECKING:
    from dali_pipes.store.cloud.settings import CloudSettings

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
        advice = f"; is it the right address? {_ADDRESS.get(settings.scheme, 'check the URL')}"
    return StoreError(f"{at}: {refusal.text}{advice}")


_ADDRESS = {
    "s3": "set AWS_ENDPOINT_URL for a server that is not Amazon's",
    "gs": "set GOOGLE_BASE_URL or STORAGE_EMULATOR_HOST for a server that is not Google's",
    "az": "set AZURE_STORAGE_ENDPOINT for a server that is not Microsoft's",
}
