"""Count why records or samples are left out, and decide whether they are too many."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%")
_COUNT = re.compile(r"[0-9]{1,18}")
# Values that differ from one file to the next: what stands in quotation marks, first bytes, checksums, and numbers that
# are no limits of an option.
_QUOTED, _STARTS = re.compile("'[^']*'"), re.compile(r" \(starts with [^)]*\)")
_NUMBER = re.compile(r"(?<![=\w])(?:[0-9a-f]{8,16}\b|[0-9]+)")


@dataclass(frozen=True)
class MaxBad:
    """How many bad ones are allowed: a number, or a share of all.

    >>> MaxBad.parse("10%").allows(3, of=30), MaxBad.parse("2").allows(3, of=30)
    (True, False)
    """

    text: str
    count: int | None
    share: float

    @classmethod
    def parse(cls, text: str) -> "MaxBad":
        """Read ``"12"`` or ``"2.5%"``.

        Raises:
            ValueError: If it is neither, or more than 100%.
        """
        found = _SHARE.fullmatch(text)
        if found and float(found[1]) <= 100:
            return cls(text, None, float(found[1]) / 100)
        if _COUNT.fullmatch(text):
            return cls(text, int(text), 0.0)
        raise ValueError(f"expected a number such as '12', or a share from '0%' to '100%', got '{text}'")

    def __str__(self) -> str:
        """As a user typed it, for the history of a data set."""
        return self.text

    def allows(self, bad: int, *, of: int) -> bool:
        """Whether ``bad`` bad ones ``of`` so many are allowed."""
        return bad <= (self.share * of if self.count is None else self.count)


def count_reasons(lines: Iterable[str]) -> dict[str, int]:
    """Count the reasons in lines ``name: reason``, the most frequent one first.

    Texts in quotation marks become ``'...'`` and numbers ``N``, so that one reason is one line.

    >>> count_reasons(["a: is empty", "b: has 10 x 20 pixels", "c: has 30 x 40 pixels"])
    {'has N x N pixels': 2, 'is empty': 1}
    """
    return dict(Counter(as_reason(line.partition(": ")[2] or line) for line in lines).most_common())


def as_reason(text: str) -> str:
    """A description of one file's fault, without what belongs to this file alone."""
    return _NUMBER.sub("N", _QUOTED.sub("'...'", _STARTS.sub("", text)))
