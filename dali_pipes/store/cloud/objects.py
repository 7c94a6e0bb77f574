"""Answers of clouds and web servers about an object: whether they are its bytes, and what follows if not.

A store of a cloud finds the credentials and signs; here are only requests that are signed already. A signature ends
after some time, and so do the credentials with which it was made. So an object is signed for anew when its signature is
old, and once when it is refused: a run of days needs no more than a store whose credentials are refreshed.

"""

import re
import time
from collections.abc import Callable
from html import unescape

from dali_pipes.errors import DataError, StoreError, printable
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
from dali_pipes.store.http.rules import REDIRECTS, is_passing, retry_after_s
from dali_pipes.store.http.wire import Answer
from dali_pipes.store.messages import answer_text
from dali_pipes.store.shard_set import missing_advice

# A signature is not used in its last part: the request must arrive, and clocks differ.
_USED_SHARE = 0.8
_REFUSED = (401, 403)
# With status 400 in place of 403.
_REFUSED_CODES = ("ExpiredToken", "TokenRefreshRequired", "InvalidToken", "AuthorizationQueryParametersError")
# With a status that says nothing of it.
_PASSING_CODES = ("RequestTimeout", "SlowDown", "ServerBusy", "Throttling", "ThrottlingException", "InternalError")
_NO_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound")
_ADVICE = {
    "RequestTimeTooSkewed": "the clock of this machine is wrong: set it (NTP)",
    "InvalidObjectState": "it is archived: restore it first, or change its storage class",
    "BlobArchived": "it is archived: move it to another access tier first",
    "SignatureDoesNotMatch": "the secret key is not the one that belongs to the access key",
    "InvalidAccessKeyId": "the access key does not exist there: does the endpoint belong to it?",
}
_IF_MATCH = "If-Match"


class CloudObjects(ObjectSource):
    """The objects of a cloud's bucket, or below a web server's URL.

    Args:
        ask_for: Returns the signed request for an object's name, from any thread. Raises `StoreError` if there are no
            credentials, `OSError` if their source does not answer now.
        locate: Returns an object's URL for messages: ``s3://pets/x.tar``.
        access: The server, and how to reach it.
        service: What the store is, for messages: ``S3``.
        advice: What to do if the store refuses the credentials: where they were looked for.
        address: What to do if nobody answers: which variable names the server.
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

    def where(self, name: str) -> str:
        return self._locate(name)

    def request(self, item: WantedObject, part: ObjectPart) -> ObjectRequest:
        """The signed request. What comes after the first bytes must be of the same version of the object.

        Raises:
            FaultError: If the source of the credentials does not answer now.
            StoreError: If there are no credentials.
        """
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

    def check_head(self, item: WantedObject, part: ObjectPart, answer: Answer) -> None:
        """See `ObjectSource.check_head`.

        Raises:
            DataError: Also if Google Cloud Storage unpacks the object on the way.
        """
        item.num_refused = 0
        stored = answer.headers.get("X-Goog-Stored-Content-Encoding", "identity")
        if stored != "identity" and not answer.headers.get("Content-Encoding"):
            raise DataError(
                f"'{item.where}' is stored with the Content-Encoding '{printable(stored)}', and {self.service} unpacks "
                "it on the way; upload it without (gcloud storage cp without -Z, gsutil cp without -z)"
            )
        try:
            super().check_head(item, part, answer)
        except DataError as exc:
            encoding = answer.headers.get("Content-Encoding", "identity")
            if encoding in ("", "identity"):
                raise
            raise DataError(
                f"{exc}; it came with the Content-Encoding '{printable(encoding)}': shards must be stored and sent "
                "without one"
            ) from None

    def refusal(
        self, item: WantedObject, part: ObjectPart, answer: Answer, body: bytes, *, asked: ObjectRequest
    ) -> Exception:
        """See `ObjectSource.refusal`. A signature that is refused is made anew once."""
        self.has_answered = True
        status, (code, said) = answer.status, _said(answer, body)
        text = f"{status} {code}: {said}" if code else answer_text(status, said, reason=answer.reason)
        if (wrong := self._refused_range(item, answer)) is not None:
            return wrong
        if status == 412:
            return self._replaced_meanwhile(item, part)
        if is_passing(status) or code in _PASSING_CODES:
            return FaultError(text, retry_after_s=retry_after_s(answer.headers), is_away=True)
        if (region := _region(answer, body)) and status in (400, *REDIRECTS):
            return self._other_region(item, answer, region)
        if status in _REFUSED or code in _REFUSED_CODES:
            if self._is_refused_anew(item, asked):
                return StoreError(f"{item.address}: {text}{self._refused_advice(status, code)}")
            return FaultError(text, is_fruitless=True)
        told = f"{item.address}: {text}"
        if code in _NO_BUCKET_CODES:
            text = f"{told}; is it the right name, endpoint and account?"
            return MissingObjectError(text, said=code, is_bucket=True)
        if status in (404, 410):
            advice = INDEX_ANEW if item.name.endswith(".safetensors") else missing_advice()
            return MissingObjectError(f"{told}; was it deleted? {advice}", said=text)
        return StoreError(told)

    def given_up(
        self, item: WantedObject, what: str, fault: FaultError, *, num_attempts: int, advice: str
    ) -> Exception:
        return StoreError(f"{what}; is {self.service} well, and the network between?{advice}")

    def nobody_there(self, item: WantedObject, fault: FaultError) -> StoreError:
        return StoreError(f"{item.address}: {fault}; is it the right address? {self._address}")

    def _replaced_meanwhile(self, item: WantedObject, part: ObjectPart) -> Exception:
        """The error for a range that is of another version than the first."""
        text = "it was replaced while it was read (412)"
        if part.is_stream:
            return item.replaced_meanwhile()
        if part.is_range:
            return NoRangesError(item, text)
        part.restart()
        item.version = None
        return FaultError(text, is_fruitless=True)

    def _is_refused_anew(self, item: WantedObject, asked: ObjectRequest) -> bool:
        """Note that a signature was refused; whether the one before was refused, too."""
        if item.signed is not None:
            is_current = (
                asked.url == item.signed.url and asked.headers[: len(item.signed.headers)] == item.signed.headers
            )
            if is_current or asked.url == item.target:  # else another range of the object noted it
                item.signed = None
                item.num_refused += 1
        return item.num_refused > 1

    def _refused_advice(self, status: int, code: str) -> str:
        advice = [text for text in (_ADVICE.get(code), self._advice) if text]
        if status == 403 and code in ("", "AccessDenied"):
            advice.append(
                "an object that is missing is refused in the same way to credentials that may not list the bucket"
            )
        return "".join(f"; {text}" for text in advice)

    def _other_region(self, item: WantedObject, answer: Answer, region: str) -> StoreError:
        return StoreError(
            f"{item.address}: {answer.status}: the bucket is in the region '{region}'; set AWS_REGION={region}, and an "
            "endpoint of this region if AWS_ENDPOINT_URL names one"
        )


def _said(answer: Answer, body: bytes) -> tuple[str, str]:
    """A cloud's code and message, from XML; code is empty for other answers, whose text is the message."""
    text = body.decode(errors="replace")
    code = _element(text, "Code") or answer.headers.get("X-Ms-Error-Code")
    said = _element(text, "Message") or ("" if code or "<" in text else text)
    return printable(code), printable(" ".join(said.split()) or answer.reason)


def _region(answer: Answer, body: bytes) -> str:
    """The region that an answer names as the bucket's; empty if it names none.

    A value that is not a region's name is left out: errors repeat it as a setting.
    """
    region = answer.headers.get("X-Amz-Bucket-Region") or _element(body.decode(errors="replace"), "Region")
    return region if re.fullmatch(r"[a-z0-9-]{1,40}", region) else ""


def _element(text: str, name: str) -> str:
    """The text of the first XML element of a name; no parser, which would have to be safe against hostile texts."""
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return unescape(found[1]).strip() if found else ""
