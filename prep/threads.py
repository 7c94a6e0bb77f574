"""Call a function for many items in threads, for work that waits for a store."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from dali_pipes.store.patience import PatientThreads

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(function: Callable[[Item], Result], items: Iterable[Item], num_threads: int) -> Iterator[Result]:
    """Yield ``function(item)`` for each item, in order. At most four items per thread run ahead of the caller.

    After an error, also of the caller's, the items that wait are dropped, and waits for a store end.
    """
    ahead: deque[Future[Result]] = deque()
    with PatientThreads(num_threads) as threads:
        for item in items:
            ahead.append(threads.submit(function, item))
            if len(ahead) == 4 * num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
