"""Names of shards that count up: one text in, with its numbers in braces, and each single name out."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["EXTENSIONS", "Template", "extension_of", "template_of"]

EXTENSIONS = (".tar", ".tgz", ".tar.gz")
"""Of shards. Compressed ones save room; only ``.tar`` can be indexed and trained from."""

_MAX_DIGITS = 18  # of a number in a template: it stays below 2**63
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<digits>[0-9]+)", re.DOTALL)


@dataclass(frozen=True)
class Template:
    """Names with number ranges in braces: ``train-{000..127}``, ``a-{0..8..2}-b-{1..3}``."""

    parts: Sequence[str]
    """What stands between the ranges; one more than there are ranges."""
    ranges: Sequence[range]
    widths: Sequence[int]

    @classmethod
    def parse(cls, text: str) -> "Template":
        """The template; without a pair of braces it has no range, and counts no name, as in AIS.

        Raises:
            ValueError: Braces that hold no ascending range.
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
        """How many names."""
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
        """What all names start with."""
        return self.parts[0]

    def ends(self) -> list[str]:
        """The first and the last name; none where there is no range."""
        if not self.ranges:
            return []
        return [self._filled(tuple(numbers[position] for numbers in self.ranges)) for position in (0, -1)]

    def names(self) -> Iterator[str]:
        """The names, the last range running fastest."""
        if self.ranges:
            yield from map(self._filled, _product(self.ranges))

    def holds(self, name: str) -> bool:
        """Whether it is one of the names."""
        if not name.startswith(self.prefix):
            return False
        pattern = "".join(
            re.escape(part) + ("([0-9]+)" if row < len(self.ranges) else "") for row, part in enumerate(self.parts)
        )
        match = re.fullmatch(pattern, name) if self.ranges else None
        if match is None:
            return False
        numbers = tuple(int(digits) for digits in match.groups())
        is_in = all(number in numbers_ for number, numbers_ in zip(numbers, self.ranges, strict=True))
        return is_in and self._filled(numbers) == name

    def _filled(self, numbers: Sequence[int]) -> str:
        filled = (f"{number:0{width}}" for number, width in zip(numbers, self.widths, strict=True))
        return self.parts[0] + "".join(text + part for text, part in zip(filled, self.parts[1:], strict=True))


def _product(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    # Not itertools', which first makes a tuple of each range: 40 MB for the million names that each class has.
    if not ranges:
        yield ()
        return
    first, *others = ranges
    for number in first:
        for rest in _product(others):
            yield number, *rest


def template_of(names: Sequence[str]) -> Template | None:
    """The template whose names, in order, are exactly these (without extensions); ``None`` where there is none.

    >>> str(template_of(["a-008", "a-009", "a-010"]))
    'a-{008..010}'
    """
    match = _NUMBERED.fullmatch(names[0]) if names else None
    if match is None or len(match["digits"]) > _MAX_DIGITS or re.search(r"[{}]", match["prefix"]):
        return None
    start, width = int(match["digits"]), len(match["digits"])
    found = Template([match["prefix"], ""], [range(start, start + len(names))], [width])
    return found if all(ours == name for ours, name in zip(found.names(), names, strict=True)) else None


def extension_of(name: str) -> str:
    """Which of `EXTENSIONS` a shard's name ends in; empty where in none.

    >>> extension_of("a-0.tar.gz")
    '.tar.gz'
    """
    return next((extension for extension in EXTENSIONS if name.endswith(extension)), "")
