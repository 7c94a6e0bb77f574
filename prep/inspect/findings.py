"""The findings of `prep verify`, and their kinds."""

import re
from collections.abc import Mapping
from typing import NamedTuple

KINDS: Mapping[str, str] = {
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

# Control characters, and bytes that are not UTF-8.
_ODD = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


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
        named = ", ".join(f"{what} '{name}'" for what, name in parts if name)
        # A name in a tar may hold any bytes, also control sequences of a terminal.
        return _ODD.sub(lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", f"{named}: {self.text}" if named else self.text)


def note(text: str, *, shard: str = "") -> ShardFinding:
    """A note about a shard, or about the set."""
    return ShardFinding("note", shard, "", "", text)


def without_shard(text: str, shard: str) -> str:
    """Remove the shard from the beginning of an error's text, because a finding names the shard itself."""
    return re.sub(rf"^shard '{re.escape(shard)}'(: |, | )", "", text)
