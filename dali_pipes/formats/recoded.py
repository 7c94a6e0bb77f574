"""What was done to the photos of a data set when it was packed: resized, optimized, converted.

``prep pack`` writes it beside the shards, as ``PREFIXrecoded.json``; ``prep shuffle`` copies that file, and ``prep
index`` puts its content into the manifest. A data set that was packed twice has two steps.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dali_pipes.formats.column_file import are_counts, is_count
from dali_pipes.formats.json_texts import read_json

EXPECTED = 'a list of {"settings": ..., "counts": ..., "bytes_before": ..., "bytes_after": ...}'


@dataclass(frozen=True, kw_only=True)
class RecodedStep:
    """The settings and the result of one pass over the photos and masks."""

    settings: Mapping[str, int | str | bool]
    """Those that were given: ``{"short_side": 256, "quality": 90}``."""
    counts: Mapping[str, int]
    """What was done -> the number of photos and masks: ``{"resized": 990, "kept": 10}``."""
    bytes_before: int
    """Bytes of all photos and masks that were packed, as they were in the source. (A part of the data set that is
    shuffled into shards of its own keeps the numbers of the whole.)"""
    bytes_after: int

    def as_json(self) -> dict[str, Any]:
        """All fields, with JSON's types."""
        return asdict(self)


def are_steps(value: object) -> bool:
    """Whether a value of JSON describes steps."""
    return isinstance(value, list) and all(map(_is_step, value))


def steps_of(value: Sequence[Mapping[str, Any]]) -> tuple[RecodedStep, ...]:
    """The steps that a value of JSON describes: see `are_steps`."""
    return tuple(RecodedStep(**step) for step in value)


def write_steps(steps: Sequence[RecodedStep]) -> bytes:
    """The file ``PREFIXrecoded.json``; the same steps always give the same bytes."""
    return json.dumps([step.as_json() for step in steps], indent=0, sort_keys=True).encode()


def read_steps(data: bytes) -> tuple[RecodedStep, ...]:
    """Read the file that `write_steps` wrote.

    Raises:
        ValueError: If it is not such a file.
    """
    value = read_json(data)
    if not are_steps(value):
        raise ValueError(f"expected {EXPECTED}")
    return steps_of(value)


def _is_step(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == RecodedStep.__dataclass_fields__.keys()
        and isinstance(value["settings"], dict)
        and all(isinstance(setting, int | str) for setting in value["settings"].values())
        and are_counts(value["counts"])
        and is_count(value["bytes_before"])
        and is_count(value["bytes_after"])
    )
