"""Names of shards and other objects: extensions, the prefix that shards share, which names are safe, and templates.

`ObjectEntry` is a row of a store's listing.

`Template` follows AIStore, whose jobs take such texts; `expand_braces` follows the shell, for URLs that a user names.
"""

import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dali_pipes.errors import printable

MAX_EXPANDED = 1_000_000
"""The limit of names for the braces of one URL: more are a typing error, or a data set too large for such a list."""

_MAX_NESTED = 20
_MAX_DIGITS = 18  # of a number in a template: it stays below 2**63
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<digits>[0-9]+)", re.DOTALL)


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


# AIStore's rule; those of clouds are narrower.
_BUCKET = re.compile(
    r"((?=.+/)(@(?P<uuid>[A-Za-z0-9_-]{1,64}))?(#(?P<namespace>[A-Za-z0-9._-]{1,64}))?/)?"
    r"(?P<bucket>(?!\.\.?$)[A-Za-z0-9._-]{1,64})"
)


class BucketParts(NamedTuple):
    """The parts of a bucket's name: AIStore may have it in a namespace, in another cluster, or both."""

    bucket: str
    uuid: str = ""
    """The id or alias of the other cluster."""
    namespace: str = ""

    @classmethod
    def parse(cls, text: str) -> "BucketParts":
        """Read a name as URLs have it; `ValueError` if it is not valid.

        >>> BucketParts.parse("@other#experiments/pets")
        BucketParts(bucket='pets', uuid='other', namespace='experiments')
        """
        if (found := _BUCKET.fullmatch(text)) is None:
            raise ValueError(
                f"a bucket's name is at most 64 letters, digits, '-', '_' and '.' (not '.' or '..' itself), in AIStore "
                f"also after a namespace: #NAME/BUCKET, @CLUSTER/BUCKET or @CLUSTER#NAME/BUCKET; got '{text}'"
            )
        return cls(found["bucket"], found["uuid"] or "", found["namespace"] or "")

    @property
    def text(self) -> str:
        """The name as URLs have it."""
        namespace = f"{self.uuid and f'@{self.uuid}'}{self.namespace and f'#{self.namespace}'}"
        return f"{namespace}/{self.bucket}" if namespace else self.bucket

    @property
    def query(self) -> dict[str, str]:
        """What a request's query says of the namespace."""
        return {"namespace": f"@{self.uuid}#{self.namespace}"} if self.uuid or self.namespace else {}


def split_bucket(path: str) -> tuple[str, str]:
    """The bucket of a URL without its scheme, with its namespace, and the rest of the URL.

    >>> split_bucket("#experiments/pets/shuffled-")
    ('#experiments/pets', 'shuffled-')
    """
    start = path.find("/") + 1 if path.startswith(("@", "#")) else 0
    bucket, _, name = path[start:].partition("/")
    return path[:start] + bucket, name


@dataclass(frozen=True)
class Template:
    """Names with number ranges in braces: ``train-{000..127}``, ``a-{0..8..2}-b-{1..3}``."""

    parts: Sequence[str]
    """The texts around the ranges; there is one more of them than of ranges."""
    ranges: Sequence[range]
    widths: Sequence[int]

    @classmethod
    def parse(cls, text: str) -> "Template":
        """The template of a text. A text without braces has no range and stands for no name, as in AIS.

        Raises:
            ValueError: If braces do not hold an ascending range.
        """
        if "{" not in text or "}" not in text:
            return cls([text], [], [])
        pieces = re.split(r"\{(\d+)\.\.(\d+)(?:\.\.(\d+))?\}", text)
        parts, ranges, widths = pieces[::4], [], []
        for first, last, step in zip(pieces[1::4], pieces[2::4], pieces[3::4], strict=True):
            if max(map(len, (first, last, step or ""))) > _MAX_DIGITS:
                raise ValueError(f"invalid 'bash' template \"{text[:100]}\": numbers are too long")
            if int(first) > int(last) or int(step or 1) == 0:
                raise ValueError(f"invalid 'bash' template \"{text}\": {{{first}..{last}}} does not ascend")
            ranges.append(range(int(first), int(last) + 1, int(step or 1)))
            widths.append(min(len(first), len(last)))
        if any("{" in part or "}" in part for part in parts):
            raise ValueError(f"invalid 'bash' template \"{text}\" (expecting e.g. 'prefix-{{0001..0010..1}}-suffix')")
        if math.prod(map(len, ranges)) >= 1 << 63:
            raise ValueError(f"invalid 'bash' template \"{text[:100]}\": too many names")
        return cls(parts, ranges, widths)

    def __len__(self) -> int:
        """The number of names."""
        return math.prod(len(numbers) for numbers in self.ranges) if self.ranges else 0

    def __str__(self) -> str:
        """The text that `parse` takes."""
        text = self.parts[0]
        for numbers, width, part in zip(self.ranges, self.widths, self.parts[1:], strict=True):
            step = f"..{numbers.step}" if numbers.step != 1 else ""
            text += f"{{{numbers[0]:0{width}}..{numbers[-1]:0{width}}{step}}}{part}"
        return text

    @property
    def prefix(self) -> str:
        """The text with which all names start."""
        return self.parts[0]

    def ends(self) -> list[str]:
        """The first and the last name; an empty list if there is no range."""
        if not self.ranges:
            return []
        return [self._filled(tuple(numbers[position] for numbers in self.ranges)) for position in (0, -1)]

    def names(self) -> Iterator[str]:
        """The names; the last range runs fastest."""
        # Not itertools.product, which first makes a tuple of each range: 40 MB for a million names.
        for number in range(len(self)):
            numbers: list[int] = []
            for values in reversed(self.ranges):
                number, position = divmod(number, len(values))
                numbers.insert(0, values[position])
            yield self._filled(numbers)

    def holds(self, name: str) -> bool:
        """Whether this is one of the names."""
        if not self.ranges or not name.startswith(self.parts[0]):
            return False
        match = re.fullmatch("([0-9]+)".join(map(re.escape, self.parts)), name)
        if match is None:
            return False
        numbers = [int(digits) for digits in match.groups()]
        is_in = all(number in numbers_ for number, numbers_ in zip(numbers, self.ranges, strict=True))
        return is_in and self._filled(numbers) == name

    def _filled(self, numbers: Sequence[int]) -> str:
        filled = (f"{number:0{width}}" for number, width in zip(numbers, self.widths, strict=True))
        return self.parts[0] + "".join(text + part for text, part in zip(filled, self.parts[1:], strict=True))


def template_of(names: Sequence[str]) -> Template | None:
    """The template of exactly these names (without extensions), in their order; ``None`` if there is none.

    >>> str(template_of(["a-008", "a-009", "a-010"]))
    'a-{008..010}'
    """
    match = _NUMBERED.fullmatch(names[0]) if names else None
    if match is None or len(match["digits"]) > _MAX_DIGITS or re.search(r"[{}]", match["prefix"]):
        return None
    start, width = int(match["digits"]), len(match["digits"])
    found = Template([match["prefix"], ""], [range(start, start + len(names))], [width])
    return found if all(ours == name for ours, name in zip(found.names(), names, strict=True)) else None


def expand_braces(text: str) -> list[str]:
    """The names that a text with braces stands for, as in a shell: ranges that count up or down, and lists.

    Raises:
        ValueError: If there are more than `MAX_EXPANDED` names, or braces are nested too deeply.
    """
    from braceexpand import braceexpand

    depths = itertools.accumulate((one == "{") - (one == "}") for one in text)
    if max(depths, default=0) > _MAX_NESTED:
        raise ValueError(f"'{printable(text)}': braces are nested deeper than {_MAX_NESTED}; simplify the pattern")
    if _num_names(text) > MAX_EXPANDED:
        raise ValueError(
            f"'{text}' stands for more than {MAX_EXPANDED:,} names; name the prefix alone to list the shards"
        )
    return list(braceexpand(text))


def _num_names(text: str) -> int:
    """Count the names without making them: `braceexpand` would hold all names of each range in memory."""
    num_names, depth, start = 1, 0, 0
    for position, character in enumerate(text):
        if character == "{":
            start = start if depth else position + 1
            depth += 1
        elif character == "}":
            depth -= 1
            if not depth:
                num_names *= _num_choices(text[start:position])
    return num_names


def _num_choices(braces: str) -> int:
    if match := _RANGE.fullmatch(braces):
        if max(map(len, match.groups(""))) > 18:
            return MAX_EXPANDED + 1
        first, last, step = (int(text or 1) for text in match.groups())
        return abs(last - first) // max(1, abs(step)) + 1
    depth, start, total = 0, 0, 0
    for position, character in enumerate(braces):
        depth += (character == "{") - (character == "}")
        if character == "," and not depth:
            total += _num_names(braces[start:position])
            start = position + 1
    return total + _num_names(braces[start:])


EXTENSIONS = (".tar", ".tgz", ".tar.gz")
"""The extensions of shards. Compressed shards save space; only ``.tar`` can be indexed and trained from."""

# No command here reads these. They are recognised, so that the error can say how a shard is compressed.
_FOREIGN = (".tar.lz4", ".tar.zst", ".tar.xz", ".tar.bz2", ".txz", ".tbz2")

# An empty part, a part '.' or '..', or a NUL. The last part may be empty: a prefix may end with a slash.
_ODD_PART = re.compile(r"(?:^|/)(?:\.{0,2}/|\.{1,2}$)|\0")

# Shards that were added to a data set, or written anew for it: their names begin with that of its manifest.
_ADDED = re.compile(r"(.*)(?:add|compact)-[0-9a-f]{10}-[0-9]+\.tar", re.DOTALL)


def extension_of(name: str) -> str:
    """The extension of `EXTENSIONS` in which a shard's name ends; empty if it ends in none of them.

    >>> extension_of("a-0.tar.gz")
    '.tar.gz'
    """
    return next((extension for extension in EXTENSIONS if name.endswith(extension)), "")


def ending_of(name: str) -> str:
    """The extension of a shard's name, also one that no command reads; empty if the name is not a shard's."""
    return extension_of(name) or next((ending for ending in _FOREIGN if name.endswith(ending)), "")


def stem_of(name: str) -> str:
    return name.removesuffix(ending_of(name))


def prefix_of(name: str) -> str:
    """A shard's name without its number and extension.

    >>> prefix_of("train/shuffled-000012.tar")
    'train/shuffled-'
    """
    return stem_of(name).rstrip("0123456789")


def shared_prefix(names: Sequence[str]) -> str:
    """The text with which all shard names start, without the digits that count them.

    >>> shared_prefix(["shuffled-000000.tar", "shuffled-000012.tar"])
    'shuffled-'
    >>> shared_prefix(["only.tar"])
    'only'
    """
    stems = [stem_of(name) for name in names]
    return os.path.commonprefix(stems).rstrip("0123456789")  # noqa: RUF071 (character by character is intended)


def grown_prefix(names: Sequence[str]) -> str | None:
    """The prefix of the data set to which shards were added, or written anew, by their names; ``None``: other names.

    >>> grown_prefix(["shuffled-add-3f9a6c01d2-000000.tar"]), grown_prefix(["shuffled-000000.tar"])
    ('shuffled-', None)
    """
    found = [_ADDED.fullmatch(name) for name in names]
    prefixes = {match[1] if match else None for match in found}
    return prefixes.pop() if len(prefixes) == 1 else None


def check_object_name(name: str, *, url: str) -> None:
    """Refuse an object's name, or a prefix of names, that would mean another object in an HTTP path.

    Clients resolve dots there: ``ais://pets/../photos/a`` would be read from, or written to, another bucket.

    Raises:
        ValueError: If a part between slashes is ``.`` or ``..``, a part other than the last is empty, or there is a
            NUL; names ``url``.
    """
    if not is_object_name(name):
        raise ValueError(
            f"'{without_nul(url)}': the parts of an object's name must not be empty, '.' or '..', nor hold a NUL, "
            f"got '{without_nul(name)}'"
        )


def is_object_name(name: str) -> bool:
    """Whether a name, or a prefix of names, means the same object in an HTTP path and below a directory."""
    return not _ODD_PART.search(name)


def without_nul(text: str) -> str:
    """A text for a message, each NUL written as ``\\0``."""
    return text.replace("\0", "\\0")
