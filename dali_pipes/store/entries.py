"""The schemes of URLs that name a bucket, and the rows of a listing."""

from dataclasses import dataclass, field

PROVIDERS = {"ais": "ais", "s3": "aws", "gs": "gcp", "az": "azure"}
"""URL scheme to AIS provider. With an endpoint, a bucket of a cloud is read through the cluster that has it as a
backend."""
SERVERS = ("https", "http")
"""The schemes of servers that only send files."""
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
