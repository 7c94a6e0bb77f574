"""The result of one check: what was found, its status, and what to do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """The action to take; empty if none is needed."""


Findings = Iterator[Finding]


def ok(name: str, found: str) -> Finding:
    """Report that all is well."""
    return Finding(name=name, status="ok", found=found)


def warn(name: str, found: str, advice: str) -> Finding:
    """Report a problem with which loaders still work, but slowly or not in every case."""
    return Finding(name=name, status="warn", found=found, advice=advice)


def fail(name: str, found: str, advice: str) -> Finding:
    """Report a problem with which loaders do not work."""
    return Finding(name=name, status="fail", found=found, advice=advice)


def worst(findings: Sequence[Finding]) -> Status:
    """Return ``fail`` if a finding has this status, else ``warn`` if one has it, else ``ok``.

    >>> worst([ok("a", ""), warn("b", "", "")])
    'warn'
    """
    order: tuple[Status, ...] = ("ok", "warn", "fail")
    return max((finding.status for finding in findings), key=order.index, default="ok")


def counted(number: int, what: str) -> str:
    """``1 core``, ``2 cores``."""
    return f"{number} {what}{'' if number == 1 else 's'}"
