"""The registry of stores by the schemes of their URLs, and the rows of a listing."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Scheme(NamedTuple):
    """The beginning of URLs that name a bucket or a server."""

    opener: str
    """``module:function``: called with the scheme and the bucket or host, it opens the store. Imported when needed."""
    provider: str = ""
    """AIStore's name for the cloud: with an endpoint, the bucket is read through the cluster that has it as a
    backend. Empty: never."""
    is_read_only: bool = False
    """Whether it is a server that only sends files."""


_CLOUD = "dali_pipes.store.cloud.bucket:open_bucket"
SCHEMES = {
    "ais": Scheme("dali_pipes.store.cluster.ais:open_bucket", provider="ais"),
    "s3": Scheme(_CLOUD, provider="aws"),
    "gs": Scheme(_CLOUD, provider="gcp"),
    "az": Scheme(_CLOUD, provider="azure"),
    "https": Scheme(_CLOUD, is_read_only=True),
    "http": Scheme(_CLOUD, is_read_only=True),
}
"""A new store is a line here, and a module with its opener."""
PROVIDERS = {scheme: found.provider for scheme, found in SCHEMES.items() if found.provider}
SERVERS = tuple(scheme for scheme, found in SCHEMES.items() if found.is_read_only)
DIRECT = "direct"
"""The endpoint that stands for none: buckets of clouds are read without AIStore, also where AIS_ENDPOINT is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectEntry:
    """One row of a listing."""

    name: str
    size: int
    checksum: str | None
    """``xxhash2`` in hexadecimal, or ``None`` if the store does not know it."""
    written_ns: tuple[int, int] | None = field(default=None, compare=False)
    """The object was last written between these two times of the store's clock, in ns since 1970; ``None`` if the
    store does not list them. A file's two times differ, because programs can set one of them."""
