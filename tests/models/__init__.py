"""Independent models of what the documents promise: `python -m tests.models`.

`epochs`, `resume`, `faces` and `loops` compare loaders with each other: as many ranks, after a stop, in other loops.
"""

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("changes", "epochs", "tars", "users", "world")))
