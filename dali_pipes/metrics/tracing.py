"""Report what takes long as spans of OpenTelemetry, if the program uses it.

Nothing here imports OpenTelemetry: a program that exports spans has imported its API, and no other program pays for it.
Spans are reported when they end. Their parent is the current span of the thread that reports them, if it has one.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

_log = logging.getLogger(__name__)

_NAME = "dali_pipes"


def report(name: str, *, seconds: float, error: BaseException | None = None, **attributes: str | int | float) -> None:
    """Report a span ``dali_pipes.NAME`` that ends now and took ``seconds``; without OpenTelemetry do nothing."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return
    try:
        stop = time.time_ns()
        found = {f"{_NAME}.{key}": value for key, value in attributes.items()}
        span = api.get_tracer(_NAME).start_span(
            f"{_NAME}.{name}", start_time=stop - int(seconds * 1e9), attributes=found
        )
        if error is not None:
            span.record_exception(error)
            span.set_status(api.StatusCode.ERROR)
        span.end(end_time=stop)
    except Exception:  # noqa: BLE001 (an exporter's fault must not end a training)
        _log.debug("a span could not be reported", exc_info=True)


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Report what runs inside this context, or each call of the function that it decorates, as a span."""
    started = time.perf_counter()
    try:
        yield
    except BaseException as exc:
        report(name, seconds=time.perf_counter() - started, error=exc)
        raise
    report(name, seconds=time.perf_counter() - started)
