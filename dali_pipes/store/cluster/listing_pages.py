"""Read the pages of a listing from a server that may be no AIStore, or send pages without end."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dali_pipes.errors import StoreError
from dali_pipes.store.entries import ObjectEntry

if TYPE_CHECKING:
    from aistore.sdk import Bucket

# Pages have up to 10,000 names, those of clouds 1,000: so 10 million objects at least can be listed.
MAX_PAGES = 10_000
MAX_LISTED_CHARS = 1 << 30


def read_pages(bucket: "Bucket", prefix: str, *, where: str) -> Iterator[ObjectEntry]:
    """The entries of a listing.

    Args:
        bucket: The SDK's.
        prefix: Of the names.
        where: The same as a URL, for messages.

    Raises:
        StoreError: If an answer cannot be a page of a listing, or the pages do not end.
        Exception: What the SDK raises.
    """
    token = uuid = ""
    tokens, num_chars = {token}, 0
    while True:
        try:
            page = bucket.list_objects(prefix=prefix, props="name,size,checksum", uuid=uuid, continuation_token=token)
        except UnicodeDecodeError:
            raise _not_a_listing(where, "has a name that is not UTF-8") from None
        for entry in page.entries:
            if not entry.name or entry.size < 0:
                raise _not_a_listing(where, "has an entry without a name or a size")
            num_chars += len(entry.name)
            yield ObjectEntry(name=entry.name, size=entry.size, checksum=entry.checksum or None)
        uuid, token = page.uuid, page.continuation_token
        if not token:
            return
        if token in tokens:
            raise StoreError(f"'{where}': its listing has no end: page {len(tokens)} leads back to an earlier one")
        tokens.add(token)
        num_chars += len(token)
        if num_chars > MAX_LISTED_CHARS or len(tokens) > MAX_PAGES:
            raise StoreError(
                f"'{where}': its listing has more than {MAX_PAGES} pages, or names of more than {MAX_LISTED_CHARS} "
                "characters; name fewer objects by a longer prefix"
            )


def _not_a_listing(where: str, what: str) -> StoreError:
    return StoreError(f"'{where}': the server is not an AIStore (its listing {what})")
