"""``msc://PROFILE/PATH``: a bucket named by a profile of the Multi-Storage Client's configuration.

Only the configuration is that package's. The bucket is read and written as any other: its provider, address and
credentials become `CloudSettings`.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from dali_pipes.errors import StoreError
from dali_pipes.store.cloud.settings import CloudSettings, connection_options

_SCHEMES = {"s3": "s3", "s8k": "s3", "ais_s3": "s3", "gcs_s3": "s3", "gcs": "gs", "azure": "az"}
# Where another URL of ours reads the same storage.
_OTHERS = {
    "ais": "name the bucket as ais://BUCKET/PREFIX, with AIS_ENDPOINT",
    "file": "name the files by their path",
}
_STORAGE = {
    "s3": {"region_name": "aws_region", "endpoint_url": "aws_endpoint_url"},
    "gs": {"endpoint_url": "google_base_url"},
    "az": {"endpoint_url": "azure_storage_endpoint"},
}
_CREDENTIALS = {
    ("s3", "S3Credentials"): {
        "access_key": "aws_access_key_id",
        "secret_key": "aws_secret_access_key",
        "session_token": "aws_session_token",
    },
    ("gs", "GoogleServiceAccountCredentials"): {"file": "google_service_account_path"},
    ("az", "AzureCredentials"): {"connection": ""},
    ("az", "DefaultAzureCredentials"): {},
}
# Options of a provider that change how fast its own client transfers, not what is read.
_TUNING = (
    "multipart_threshold", "multipart_chunksize", "io_chunksize", "max_concurrency", "max_pool_connections",
    "connect_timeout", "read_timeout", "retries", "rust_client", "request_checksum_calculation",
    "response_checksum_validation", "project_id", "validate_content", "python_multipart_executor",
)  # fmt: skip
# Parts of a profile by which several places, or a list of files, stand behind one name.
_COMPOSED = ("provider_bundle", "storage_provider_profiles", "metadata_provider")


def open_profile(url: str) -> tuple[CloudSettings, str]:
    """How the bucket of ``msc://PROFILE/PATH`` is reached, and the object's name in it.

    With an empty ``base_path``, the path's first part is the bucket.

    Raises:
        StoreError: If the package is not installed, or its configuration cannot be read.
        ValueError: If there is no such profile, or it says what cannot be done here.
    """
    profile, _, path = url.partition("://")[2].partition("/")
    found, at = _find(profile, url)
    storage = found.get("storage_provider") or {}
    kind, options = str(storage.get("type")), dict(storage.get("options") or {})
    where = f"'{url}': profile '{profile}' of '{at}'"
    if composed := next((name for name in _COMPOSED if found.get(name)), None):
        raise ValueError(f"{where} has '{composed}', which is not read; name a profile of one bucket")
    if kind not in _SCHEMES:
        advice = _OTHERS.get(kind, f"expected one of {', '.join(_SCHEMES)}")
        raise ValueError(f"{where} has the storage '{kind}', which is not read by msc://; {advice}")
    scheme, named = _SCHEMES[kind], f"msc://{profile}"
    if options.get("endpoint_url") and not str(options["endpoint_url"]).startswith(("http://", "https://")):
        raise ValueError(f"{where}: endpoint_url must be an address such as http://127.0.0.1:9000")
    base = str(options.pop("base_path", "")).strip("/")
    if "/" in base:
        raise ValueError(
            f"{where}: base_path '{base}' must be a bucket or empty; set it to '{base.partition('/')[0]}', and write "
            f"'{named}/{base.partition('/')[2]}/{path}'"
        )
    if not base:
        base, _, path = path.partition("/")
        named = f"{named}/{base}"
        if not base:
            raise ValueError(f"{where} has no base_path, so the URL must name the bucket: {named}BUCKET/PREFIX")
    settings = CloudSettings.from_environment(scheme, base).options
    changed = _renamed(options, _STORAGE[scheme], f"{where}: the storage's option")
    changed |= _credentials(found.get("credentials_provider") or {}, scheme, where)
    if scheme == "az" and "azure_storage_account_name" not in {**settings, **changed}:
        changed |= _account(changed.get("azure_storage_endpoint", ""))
    return CloudSettings(
        scheme=scheme, bucket=base, options=_without_rivals(settings, changed) | changed, named=named
    ), path


def _find(profile: str, url: str) -> tuple[Mapping[str, Any], str]:
    try:
        from multistorageclient import StorageClientConfig
        from multistorageclient.utils import expand_env_vars
    except ImportError as exc:
        raise StoreError(
            f"'{url}': profiles of msc:// are read by the package 'multi-storage-client', and it is not installed; pip "
            "install 'dali-pipes[msc]'"
        ) from exc
    try:
        config, path = StorageClientConfig.read_msc_config()
        found = ((config or {}).get("profiles") or {}).get(profile)
        if path is None:
            raise ValueError(
                f"'{url}': no configuration of the Multi-Storage Client was found; set MSC_CONFIG to its file"
            )
        if found is None:
            names = ", ".join(sorted((config or {}).get("profiles") or {})) or "none"
            raise ValueError(f"'{url}': '{path}' has no profile '{profile}' (found: {names})")
        return expand_env_vars(found), path
    except RuntimeError as exc:
        # The package's own text may repeat what the file holds: keys, too.
        broken = getattr(exc.args[-1], "json_path", "$"), getattr(exc.args[-1], "validator", "")
        raise StoreError(
            f"'{url}': the configuration of the Multi-Storage Client is not valid at '{broken[0]}' (rule: {broken[1]})"
        ) from None


def _renamed(options: Mapping[str, Any], names: Mapping[str, str], what: str) -> dict[str, str]:
    found = {}
    for name, value in options.items():
        if name == "signature_version" and value == "UNSIGNED":
            found["aws_skip_signature"] = "true"
        elif name in names:
            found[names[name]] = str(value)
        elif name not in _TUNING:
            raise ValueError(f"{what} '{name}' is not read (known: {', '.join(names)}); set the cloud's own variable")
    return {name: value for name, value in found.items() if value}


def _credentials(provider: Mapping[str, Any], scheme: str, where: str) -> dict[str, str]:
    if not provider:
        return {}
    kind, options = str(provider.get("type")), dict(provider.get("options") or {})
    if (scheme, kind) not in _CREDENTIALS:
        known = ", ".join(name for other, name in _CREDENTIALS if other == scheme)
        raise ValueError(
            f"{where} has the credentials '{kind}', which are not read (known: {known}); set the cloud's own variables"
        )
    found = _renamed(options, _CREDENTIALS[scheme, kind], f"{where}: the credentials' option")
    return (
        connection_options(str(options["connection"]), name=f"{where}: 'connection'")
        if "connection" in options
        else found
    )


def _account(endpoint: str) -> dict[str, str]:
    """Azure's account, which its address begins with: ``https://ACCOUNT.blob.core.windows.net``."""
    name, _, rest = (urlsplit(endpoint).hostname or "").partition(".")
    return {"azure_storage_account_name": name} if rest.startswith("blob.") else {}


def _without_rivals(settings: Mapping[str, str], changed: Mapping[str, str]) -> dict[str, str]:
    """The environment's settings, without its keys where the profile has its own."""
    if "aws_access_key_id" in changed:
        return {name: value for name, value in settings.items() if name != "aws_session_token"}
    if "google_service_account_path" in changed:
        return {name: value for name, value in settings.items() if not name.startswith("google_") or "base_url" in name}
    if {"azure_storage_account_key", "azure_storage_sas_token"} & {*changed}:
        return {}
    return dict(settings)
