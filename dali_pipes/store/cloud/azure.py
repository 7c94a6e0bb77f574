"""Sign URLs of Azure's objects where `obstore` cannot: by an access signature (SAS), and for names that URLs quote."""

import base64
import binascii
import hashlib
import hmac
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlencode

from dali_pipes.errors import StoreError
from dali_pipes.store.cloud.settings import CloudSettings

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
