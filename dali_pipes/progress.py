"""Draw progress bars for long steps on stderr, if stderr is a terminal."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

T = TypeVar("T")


def progress(items: Iterable[T], *, what: str, unit: str, shown: bool = True) -> Iterator[T]:
    """Yield ``items`` under a bar labelled ``what``. The bar stays on the screen at the end."""
    with bar(what=what, total=len(items) if isinstance(items, Sized) else None, unit=unit, shown=shown) as drawn:
        for item in items:
            yield item
            drawn.update(1)


def bar(*, what: str, total: int | None, unit: str, shown: bool = True, delay_s: float = 0) -> Any:
    """A bar that the caller moves with ``update(n)``; a context manager. ``unit="B"`` shows KiB, MiB or GiB.

    It is drawn after ``delay_s`` seconds, if stderr is a terminal and ``shown`` is true.
    """
    from tqdm import tqdm

    scaled: dict[str, Any] = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    # For tqdm, None means: only if stderr is a terminal.
    disable = None if shown else True
    return tqdm(
        desc=what, total=total, unit=unit, leave=True, disable=disable, dynamic_ncols=True, delay=delay_s, **scaled
    )
