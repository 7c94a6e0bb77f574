"""How a cloud's bucket is reached: credentials and options, from the environment variables that each cloud defines.

`obstore` reads the same variables by itself. They are read here, once, so that a store means the same in worker
processes and on other machines: the settings travel with the store when it is pickled. They hold secrets, which no text
shows.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from dali_pipes.errors import StoreError, keep_secret, printable
from dali_pipes.formats.names import path_in_folder
from dali_pipes.store.base import SERVERS
from dali_pipes.store.cloud.profiles import ProfileCredentials

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

    ObstoreStore = S3Store | GCSStore | AzureStore | HTTPStore

_CLOUDS = {"s3": "S3", "gs": "GCS", "az": "Azure", "https": "HTTPS", "http": "HTTP"}

# The names of obstore's options, which are those of the environment variables in small letters.
_OPTIONS = {
    "s3": (
        "aws_access_key_id", "aws_secret_access_key", "aws_session_token", "aws_region", "aws_default_region",
        "aws_endpoint_url", "aws_endpoint_url_s3", "aws_virtual_hosted_style_request", "aws_skip_signature",
        "aws_request_payer", "aws_web_identity_token_file", "aws_role_arn", "aws_role_session_name",
        "aws_container_credentials_relative_uri", "aws_container_credentials_full_uri",
        "aws_container_authorization_token_file", "aws_imdsv1_fallback", "aws_server_side_encryption",
        "aws_sse_kms_key_id", "aws_sse_bucket_key_enabled", "aws_checksum_algorithm", "aws_s3_express",
        "aws_disable_tagging", "aws_unsigned_payload", "aws_conditional_put",
    ),
    "gs": (
        "google_service_account", "google_service_account_path", "google_service_account_key", "google_base_url",
        "google_bearer_token", "google_application_credentials", "google_skip_signature",
    ),
    "az": (
        "azure_storage_account_name", "azure_storage_account_key", "azure_storage_access_key",
        "azure_storage_sas_token", "azure_storage_sas_key", "azure_storage_token", "azure_storage_endpoint",
        "azure_endpoint", "azure_storage_use_emulator", "azure_client_id", "azure_client_secret", "azure_tenant_id",
        "azure_authority_host", "azure_federated_token_file", "azure_msi_endpoint", "azure_identity_endpoint",
        "azure_msi_resource_id", "azure_object_id", "azure_use_azure_cli", "azure_skip_signature",
    ),
}  # fmt: skip
# An option whose name ends so is a secret.
_SECRETS = (
    "_secret_access_key", "_token", "_account_key", "_storage_access_key", "_sas_key", "_client_secret",
    "_service_account_key",
)  # fmt: skip
# Seconds for which a server may be silent.
STALL_S = 60
_TRUE = ("1", "t", "true", "y", "yes", "on")
# Azurite's address and account, which Microsoft publishes.
_AZURITE = "http://127.0.0.1:10000/devstoreaccount1"


@dataclass(frozen=True, kw_only=True)
class CloudSettings:
    """One bucket, or one folder of an HTTP server, and how it is reached."""

    scheme: str
    bucket: str
    """The bucket, the container, or for HTTP the host."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """obstore's options. They hold secrets."""

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if name.endswith(_SECRETS):
                keep_secret(value)
                # A server repeats an access signature in parts.
                keep_secret(value.partition("sig=")[2].partition("&")[0])

    @classmethod
    def from_environment(cls, scheme: str, bucket: str) -> "CloudSettings":
        """Read the variables of a cloud: AWS_*, GOOGLE_* and STORAGE_EMULATOR_HOST, or AZURE_*.

        Raises:
            ValueError: If AZURE_STORAGE_CONNECTION_STRING is not one, or the variable of a server is not a URL.
        """

        def found(name: str) -> str:
            return os.environ.get(name.upper(), "").strip()

        options = {name: value for name in _OPTIONS.get(scheme, ()) if (value := found(name))}
        if scheme == "s3" and (endpoint := options.pop("aws_endpoint_url_s3", "") or found("aws_endpoint")):
            options["aws_endpoint_url"] = endpoint
        if scheme == "gs" and (emulator := found("storage_emulator_host")):
            options.setdefault("google_base_url", emulator if "://" in emulator else f"http://{emulator}")
            options.setdefault("google_skip_signature", "true")  # an emulator asks for no credentials
        if scheme == "az":
            options = _connection_options(found("azure_storage_connection_string")) | options
        for name, variable in _ADDRESSES.items():  # of an address for S3 without http://, obstore panics
            value = options.get(name, "")
            if value and not re.match(r"https?://[^/:?#]|https?://\[", value):
                # What is behind these signs may be a secret.
                shown = printable(value.partition("?")[0].rpartition("@")[2], max_chars=100)
                raise ValueError(f"{variable} must be an address such as http://127.0.0.1:9000, got '{shown}'")
            if "@" in value:  # not the host alone: a password may have a slash
                raise ValueError(f"{variable} must not hold a user name or a password: errors and logs name the server")
        return cls(scheme=scheme, bucket=bucket, options=options)

    @property
    def url(self) -> str:
        """The bucket's URL, as the user writes it."""
        return f"{self.scheme}://{self.bucket}"

    @property
    def cloud(self) -> str:
        """The cloud's name, for messages."""
        return _CLOUDS[self.scheme]

    @property
    def is_anonymous(self) -> bool:
        """Whether requests are not signed."""
        if self.scheme in SERVERS:
            return True
        name = {"s3": "aws", "gs": "google", "az": "azure"}[self.scheme]
        return self.options.get(f"{name}_skip_signature", "").lower() in _TRUE

    @property
    def is_sorted(self) -> bool:
        """Whether listings come in the order of names: not those of S3's directory buckets (S3 Express)."""
        return not self.bucket.endswith("--x-s3") and self.options.get("aws_s3_express", "").lower() not in _TRUE

    @property
    def origin(self) -> str:
        """The server, for messages: ``https://s3.eu-west-1.amazonaws.com``."""
        parts = urlsplit(self.base_url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def lists_times(self) -> bool:
        """Whether the server lists when an object was last written. AIStore, below ``/s3``, lists its last reading."""
        return not urlsplit(self.options.get("aws_endpoint_url", "")).path.rstrip("/").endswith("/s3")

    @property
    def base_url(self) -> str:
        """The URL of the bucket; an object's name follows after a slash."""
        options = self.options
        if self.scheme == "gs":
            server = options.get("google_base_url", "https://storage.googleapis.com")
        elif self.scheme == "az":
            server = options.get("azure_storage_endpoint") or options.get("azure_endpoint") or ""
            if not server and options.get("azure_storage_use_emulator", "").lower() in _TRUE:
                server = _AZURITE
            server = server or f"https://{options.get('azure_storage_account_name', '')}.blob.core.windows.net"
        elif self.scheme == "s3":
            is_virtual = options.get("aws_virtual_hosted_style_request", "").lower() in _TRUE
            region = options.get("aws_region") or options.get("aws_default_region") or "us-east-1"
            server = options.get("aws_endpoint_url", "")
            if is_virtual:  # by obstore's rule, such an endpoint names the bucket itself
                return server.rstrip("/") or f"https://{self.bucket}.s3.{region}.amazonaws.com"
            server = server or f"https://s3.{region}.amazonaws.com"
        else:
            return self.url
        return f"{server.rstrip('/')}/{self.bucket}"

    def plain_url(self, name: str) -> str:
        """The URL of an object that needs no signature."""
        return f"{self.base_url}/{quote(self.path(name), safe='/-_.~')}"

    def path(self, name: str) -> str:
        """Where an object lies: on a server as in a directory, whose files it may be."""
        return path_in_folder(name) if self.scheme in SERVERS else name

    def locate(self, name: str) -> str:
        """The URL of an object, for messages."""
        return f"{self.url}/{self.path(name)}"

    @cached_property
    def opened(self) -> "ObstoreStore":
        """The store of `obstore`.

        Raises:
            StoreError: If `obstore` is not installed, or the settings contradict each other.
        """
        try:
            from obstore import store as stores
            from obstore.exceptions import BaseError
        except ImportError as exc:
            raise StoreError(
                f"'{self.url}' is read without AIStore, which needs the package 'obstore', and it "
                "is not installed; pip install 'dali-pipes[cloud]', or pass endpoint= (--endpoint) of an AIStore that "
                "has the bucket as a backend"
            ) from exc
        common: dict[str, Any] = {
            "client_options": {
                "allow_http": urlsplit(self.base_url).scheme == "http",
                "connect_timeout": "5s",
                "read_timeout": f"{STALL_S}s",  # of a silence
                "timeout": f"{10 * STALL_S}s",  # for a whole request; the longest writes one part
                **_trusted(),
            },
            # Short troubles end here; for longer ones there is `dali_pipes.store.patience`, which tells the user.
            "retry_config": {"max_retries": 2},
        }
        try:
            if self.credentials is not None:
                common["credential_provider"] = self.credentials
            makers: dict[str, Any] = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}
            if self.scheme not in makers:
                return stores.HTTPStore.from_url(self.base_url, **common)
            opened: ObstoreStore = makers[self.scheme](self.bucket, config=dict(self.options), **common)
            return opened
        except (BaseError, ValueError) as exc:
            raise StoreError(
                f"cannot open '{self.url}': {str(exc).partition(chr(10))[0]}; check the variables "
                f"that hold the settings of {self.cloud}"
            ) from None

    @cached_property
    def credentials(self) -> ProfileCredentials | None:
        """Credentials of AWS's profiles, which `obstore` does not read; ``None`` without profiles.

        Raises:
            StoreError: If boto3 is not installed, or the profiles have no credentials.
        """
        if self.scheme != "s3" or "aws_access_key_id" in self.options or self.is_anonymous:
            return None
        files = (
            os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
            os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
        )
        if "AWS_PROFILE" not in os.environ and not any(Path(file).expanduser().is_file() for file in files):
            return None
        try:
            from boto3 import Session
            from botocore.exceptions import BotoCoreError
        except ImportError as exc:
            raise StoreError(
                f"cannot open '{self.url}': AWS's profiles are read by the package 'boto3', and it is not "
                "installed; pip install 'dali-pipes[cloud]', or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from exc
        try:
            return ProfileCredentials(Session)
        except (BotoCoreError, ValueError, OSError) as exc:
            raise StoreError(
                f"cannot open '{self.url}': no credentials in AWS's profiles: {exc}; check AWS_PROFILE, "
                "~/.aws/config and ~/.aws/credentials"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("opened", "credentials")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # its secrets are secret in this process, too


_ADDRESSES = {
    "aws_endpoint_url": "AWS_ENDPOINT_URL (or AWS_ENDPOINT_URL_S3, AWS_ENDPOINT)",
    "google_base_url": "GOOGLE_BASE_URL (or STORAGE_EMULATOR_HOST)",
    "azure_storage_endpoint": "AZURE_STORAGE_ENDPOINT (or a field of AZURE_STORAGE_CONNECTION_STRING)",
    "azure_endpoint": "AZURE_ENDPOINT",
}


def _trusted() -> dict[str, Any]:
    """The certificates to trust beside the system's, which clouds' clients and `requests` take from the same names."""
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        if value := os.environ.get(name):
            try:
                return {"root_certificate": Path(value).read_bytes()}
            except OSError as exc:
                raise StoreError(f"cannot read certificates from '{value}': {exc.strerror}; check {name}") from exc
    return {}


def _connection_options(text: str) -> dict[str, str]:
    """The options in AZURE_STORAGE_CONNECTION_STRING, which `obstore` does not read."""
    fields = {}
    for part in filter(None, text.split(";")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(
                "AZURE_STORAGE_CONNECTION_STRING must be fields NAME=VALUE with ';' between them; one field has no '='"
            )
        fields[key.strip().lower()] = value.strip()
    if fields.get("usedevelopmentstorage", "").lower() == "true":
        return {"azure_storage_use_emulator": "true"}
    names = {
        "accountname": "azure_storage_account_name",
        "accountkey": "azure_storage_account_key",
        "sharedaccesssignature": "azure_storage_sas_token",
        "blobendpoint": "azure_storage_endpoint",
    }
    return {names[key]: value for key, value in fields.items() if key in names}
