"""Draw progress bars for long steps on stderr, if stderr is a terminal."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def progress(
    items: Iterable[T], *, what: str, total: int | None = None, unit: str = "it", shown: bool = True
) -> Iterator[T]:
    """Yield ``items`` under a bar labelled ``what``. The bar stays on the screen at the end."""
    with bar(what=what, total=total if total is not None else _length(items), unit=unit, shown=shown) as drawn:
        for item in items:
            yield item
            drawn.update(1)


def bar(*, what: str, total: int | None, unit: str = "it", shown: bool = True, delay_s: float = 0) -> Any:
    """A bar to ``update(n)`` by hand; a context manager. ``unit="B"`` counts bytes in KiB, MiB, GiB.

    It is drawn if stderr is a terminal and ``shown`` is true, after ``delay_s`` seconds.
    """
    from tqdm import tqdm

    scaled: dict[str, Any] = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    # For tqdm, None means: only if stderr is a terminal.
    disable = None if shown else True
    return tqdm(
        desc=what, total=total, unit=unit, leave=True, disable=disable, dynamic_ncols=True, delay=delay_s, **scaled
    )


def _length(items: object) -> int | None:
    return len(items) if hasattr(items, "__len__") else None
