"""Tasks of workers, in a module that their processes import."""

from prep.workers import Report


def double(number: int, report: Report) -> int:
    """Twice a number."""
    if number < 0:
        raise ValueError(f"expected a number of 0 or more, got {number}")
    report(1)
    return 2 * number
