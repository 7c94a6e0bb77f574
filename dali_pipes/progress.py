"""Draw progress bars for long steps on stderr, if stderr is a terminal."""

import logging
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from dali_pipes.commands import verbosity

T = TypeVar("T")
_log = logging.getLogger(__name__)


def progress(items: Iterable[T], *, what: str, unit: str, shown: bool = True) -> Iterator[T]:
    """Yield ``items`` under a bar labelled ``what``. The bar stays on the screen at the end."""
    with bar(what=what, total=len(items) if isinstance(items, Sized) else None, unit=unit, shown=shown) as drawn:
        for item in items:
            yield item
            drawn.update(1)


def bar(*, what: str, total: int | None, unit: str, shown: bool = True, delay_s: float = 0) -> Any:
    """A bar that the caller moves with ``update(n)``; a context manager. ``unit="B"`` shows KiB, MiB or GiB.

    It is drawn after ``delay_s`` seconds, if stderr is a terminal, ``shown`` is true and the command is not quiet. The
    log says that the step begins.
    """
    from tqdm import tqdm

    _log.info("%s%s", what, "" if total is None else f": {total} {unit}")

    scaled: dict[str, Any] = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    # For tqdm, None means: only if stderr is a terminal.
    disable = None if shown and verbosity.current() != "quiet" else True
    return tqdm(
        desc=what, total=total, unit=unit, leave=True, disable=disable, dynamic_ncols=True, delay=delay_s, **scaled
    )
