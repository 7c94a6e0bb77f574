"""Read JSON of any origin: all that can be wrong with it is a `ValueError`."""

import json
from typing import Any


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: If it is not JSON, not UTF-8, holds a number of more digits than Python converts, or is nested
            deeper than Python's stack.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
