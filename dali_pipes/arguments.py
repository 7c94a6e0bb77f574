"""Check the types of arguments, and keep their values as plain Python ones.

numpy's numbers and bools are taken as Python's, because they come out of configurations and array code; the kept value
is a plain int or bool, so that the state of a loader is plain JSON. Nothing else is converted: ``"False"`` is no bool,
1 is no bool, and 8.0 is no integer.
"""

import difflib
import numbers
import operator
import sys
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, get_args


def refuse_unknown(
    owner: str, given: Iterable[str], known: Collection[str], *, instead: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse names of arguments that ``owner`` does not take; ``instead`` says what to do about some of them.

    >>> refuse_unknown("Cache", ["dir"], ["directory", "max_bytes"])
    Traceback (most recent call last):
    TypeError: Cache has no argument 'dir'; did you mean 'directory'?
    """
    for name in given:
        if name in known:
            continue
        near = [one for one in known if one.startswith(name)] or difflib.get_close_matches(name, known, 1)
        guess = f"did you mean '{near[0]}'?" if near else f"it takes {', '.join(known)}"
        raise TypeError(f"{owner} has no argument '{name}'; {instead.get(name, guess)}")


def as_integer(name: str, value: object) -> int:
    """``value`` as an int; a `TypeError` if it is not an integer: a float would give another order."""
    try:
        if _is_bool(value):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def as_bool(name: str, value: object) -> bool:
    """``value`` as a bool; a `TypeError` if it is none: every text that is not empty is true, ``"False"``, too."""
    if not _is_bool(value):
        raise TypeError(f"{name} must be a bool, got {value!r}")
    return bool(value)


def as_number(name: str, value: object) -> float:
    """``value``, an integer or a float of Python or numpy, as a float; a `TypeError` if it is no number."""
    if _is_bool(value) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError as exc:
        raise ValueError(f"{name} must be finite, got an integer that is too large") from exc


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is not one of ``choices``, a `Literal`."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def _is_bool(value: object) -> bool:
    # Commands show their help without loading numpy; a bool of numpy's is there only if numpy is.
    numpy = sys.modules.get("numpy")
    return isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_))
