"""Options of a loader: types and values are checked when an option class is made."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
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


@pytest.mark.parametrize(
    ("num_devices", "current", "device", "local_rank", "expected"),
    [
        (8, 0, "gpu", 3, 3),  # the launcher's number, since device 0 is current until a program sets another one
        (8, 0, "auto", 3, 3),
        (8, 5, "gpu", 3, 5),
        (1, 0, "gpu", 3, 0),  # each process sees only its own
        (1, 0, "gpu", 1, 0),
        (8, 0, "cuda:6", 3, 6),
        (8, 0, "cpu", 3, None),
        (0, 0, "auto", 3, None),
        (8, 0, "cuda:8", 0, "device='cuda:8', and torch finds 8 CUDA devices, from cuda:0"),
        (0, 0, "gpu", 0, "device='gpu', and torch finds no CUDA device; pass device='cpu' or 'auto'"),
    ],
)
def test_each_rank_decodes_on_its_own_gpu(
    num_devices: int,
    current: int,
    device: str,
    local_rank: int,
    expected: int | str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from dali_pipes.opening import _device_id

    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            _device_id(device, local_rank)
    else:
        assert _device_id(device, local_rank) == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 0, "world_size": 1, "mesh": object()}, "mesh gives rank and world size; leave rank and world_size"),
        ({"shuffle": dp.Shuffle(slices=3)}, r"slices must divide batch_size \* world_size, got 3 and 4 \* 1"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: dict[str, Any], text: str, small_shards: Path) -> None:
    with pytest.raises(ValueError, match=text):
        dp.loader(small_shards, dp.segmentation(crop=16), batch_size=4, **{"device": "cpu"} | options)
