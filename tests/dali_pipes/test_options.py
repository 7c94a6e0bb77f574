"""Options of a loader: types and values are checked when an option class is made."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import dali_pipes as dp


@pytest.mark.parametrize(
    ("group", "values", "error", "text"),
    [
        ("Select", {"missing": "drop"}, ValueError, "missing must be one of error, skip, empty, got 'drop'"),
        ("Select", {"exclude": None}, TypeError, "exclude must be a path or several paths, got None"),
        ("Select", {"where": 3}, TypeError, "where must be a function of the columns, or None, got 3"),
        ("Select", {"oversample": [2]}, TypeError, "oversample must be a mapping of class ids to factors, got list"),
        ("Select", {"epoch_samples": 0}, ValueError, "epoch_samples must be positive, got 0"),
        ("Select", {"buckets": 65536}, TypeError, r"buckets must be what dali_pipes.buckets\(...\) gives, or None"),
        ("Shuffle", {"window_bytes": "1GiB"}, ValueError, "window_bytes must be 'all' or a positive .*, got '1GiB'"),
        ("Shuffle", {"enabled": "False"}, TypeError, "enabled must be a bool, got 'False'"),
        ("BadSamples", {"on_error": "skip"}, ValueError, "on_error must be one of raise, substitute, got 'skip'"),
        ("BadSamples", {"max_bad": -1}, ValueError, "max_bad must not be negative, got -1"),
        ("BadSamples", {"quarantine": 3}, TypeError, "quarantine must be a path or None, got 3"),
        ("Cache", {"max_bytes": 0}, ValueError, "max_bytes must be positive, got 0"),
        ("Cache", {"verify": "often"}, ValueError, "verify must be one of first, always, never, got 'often'"),
        ("Cache", {"patience_s": "600"}, TypeError, "patience_s must be a number, got '600'"),
        ("Cache", {"patience_s": -1}, ValueError, "patience_s must be 0 or more seconds, and finite, got -1"),
        ("Cache", {"start_patience_s": True}, TypeError, "start_patience_s must be a number, got True"),
        ("Decode", {"threads": 0}, ValueError, "threads must be positive, got 0"),
        ("Decode", {"engine_share": 1.5}, ValueError, r"engine_share must be in \[0, 1\], got 1.5"),
        ("Decode", {"engine_share": "0.5"}, TypeError, "engine_share must be a number, got '0.5'"),
        ("Outputs", {"keys": 1}, TypeError, "keys must be a bool, got 1"),
        ("Outputs", {"labels": "one-hot"}, ValueError, "labels must be one of raw, contiguous, got 'one-hot'"),
    ],
)
def test_values_are_checked_when_the_group_is_made(
    group: str, values: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        getattr(dp, group)(**values)


def test_one_object_keeps_the_parameters_of_loader() -> None:
    from dali_pipes.opening import LoaderArguments

    names = [field.name for field in dataclasses.fields(LoaderArguments)]
    assert list(inspect.signature(dp.loader).parameters) == names
