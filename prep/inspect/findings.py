"""The findings of `prep verify`, and their kinds."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from dali_pipes.errors import printable

KINDS: Mapping[str, str] = {
    # Differences between the manifest and the store.
    "gone": "shards that should be there and are not",
    "beyond": "shards that the manifest does not list",
    # Faults of a shard: no loader can read the shard.
    "archive": "shards that are not complete tars",
    "split": "samples whose members do not stand together",
    "twice": "components that a sample has twice",
    "name": "members whose names cannot be keys",
    "link": "components that are links",
    # Faults of a sample: the sample can be left out.
    "duplicate": "keys that come more than once",
    "missing": "components that samples lack",
    "photo": "photos that cannot be decoded",
    "mask": "masks that are not 8-bit gray PNGs",
    "mask size": "masks of another size than their photo",
    "mask values": "masks with other values",
    "label": "labels that are not integers, or not in the class table",
    # Faults of the files that describe the shards.
    "manifest": "shards that are not as the manifest says",
    "index": "shard indexes that do not fit",
    "columns": "a column file that does not fit",
    # Notes: our loaders are not affected.
    "note": "notes",
}
"""Kind of finding -> the words that follow its count on the command line."""
SAMPLE_KINDS = frozenset({"duplicate", "missing", "photo", "mask", "mask size", "mask values", "label"})
"""Kinds for which it is enough to leave out the sample. For the others, pack or index again."""

# An error's text, which may name several members.
_TEXT_CHARS = 1000


class ShardFinding(NamedTuple):
    """One fault, or a note."""

    kind: str
    """A key of `KINDS`."""
    shard: str
    """Empty for a finding of the set as a whole."""
    key: str
    """Empty for a finding of the shard."""
    component: str
    text: str
    """The description; in messages it follows shard, key and component."""

    def __str__(self) -> str:
        parts = (("shard", self.shard), ("key", self.key), ("component", self.component))
        named = ", ".join(f"{what} '{printable(name)}'" for what, name in parts if name)
        text = printable(self.text, max_chars=_TEXT_CHARS)
        return f"{named}: {text}" if named else text


def note(text: str, *, shard: str = "") -> ShardFinding:
    """A note about a shard, or about the set."""
    return ShardFinding("note", shard, "", "", text)


def without_shard(text: str, shard: str) -> str:
    """Remove the shard from the beginning of an error's text, because a finding names the shard itself."""
    return re.sub(rf"^shard '{re.escape(shard)}'(: |, | )", "", text)
