"""The result of one check: what was found, whether it is well, and what to do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dali_pipes.commands.options import format_bytes

__all__ = ["Finding", "Findings", "Status", "counted", "fail", "format_bytes", "ok", "warn", "worst"]

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What to do; empty if there is nothing to do."""


Findings = Iterator[Finding]


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name=name, status="ok", found=found)


def warn(name: str, found: str, advice: str) -> Finding:
    """Works, but slowly or not in every case."""
    return Finding(name=name, status="warn", found=found, advice=advice)


def fail(name: str, found: str, advice: str) -> Finding:
    """Does not work."""
    return Finding(name=name, status="fail", found=found, advice=advice)


def worst(findings: Sequence[Finding]) -> Status:
    """``fail`` if one of them is, else ``warn`` if one is, else ``ok``.

    >>> worst([ok("a", ""), warn("b", "", "")])
    'warn'
    """
    order: tuple[Status, ...] = ("ok", "warn", "fail")
    return max((finding.status for finding in findings), key=order.index, default="ok")


def counted(number: int, what: str) -> str:
    """A number and its noun.

    >>> counted(1, "core"), counted(2, "core")
    ('1 core', '2 cores')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"
