"""A few hundred broken inputs for each reader: no crash, no hang, no wrong byte. `make fuzz` goes on for longer."""

import contextlib
from pathlib import Path

import pytest

from tests.fuzz.harness import fuzz
from tests.fuzz.targets.all import SEED, TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_fuzz(name: str, tmp_path: Path) -> None:
    """Seed and number are fixed, so that a run can be repeated; `make fuzz` draws other seeds."""
    outcome = fuzz(name, seed=1, keep=tmp_path)
    assert outcome.findings == []
    # A broken table of loaders is read as one without a living process, and never refused.
    assert outcome.counts["refused"] > 0 or name == "cache-slots"
    # Nearly every batch has a broken photo.
    assert outcome.counts["taken"] > 0 or name == "photo-batches"


@pytest.mark.parametrize(
    ("name", "expected", "files"),
    [("crashes", "ends with SIGSEGV", []), ("hangs", "hangs: Timeout (", []), ("lies", "a wrong byte", ["photo.bin"])],
)
def test_harness_sees_what_goes_wrong(name: str, expected: str, files: list[str], tmp_path: Path) -> None:
    """The harness reports each kind of failure, and keeps the input and the photos of its batch."""
    (finding,) = fuzz(name, seed=1, keep=tmp_path).findings
    assert expected in finding
    (kept,) = tmp_path.glob("*.bin")
    assert kept.read_bytes() != SEED
    assert str(kept) in finding
    assert sorted(path.name for path in tmp_path.glob("*.files/*"))[:2] == files


@pytest.mark.parametrize("name", ["texts", "lists"])
def test_every_reader_takes_a_seed(name: str) -> None:
    """A reader that refuses all seeds, because it looks for another file, is not tested by their mutants."""
    from tests.fuzz.targets.texts import Readers

    with contextlib.closing(TARGETS[name]()) as target:
        assert isinstance(target, Readers)
        seeds = target.seeds()
        takers = {name for data in seeds for name in target.takers(data)}
        assert takers == {*target.readers(seeds[0])}
