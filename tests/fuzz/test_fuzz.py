"""A minute of fuzzing with every run of the tests: no crash, no hang, no wrong byte. `make fuzz` goes on for longer."""

import contextlib
from pathlib import Path

import pytest

from tests.fuzz.harness import HANG_S, fuzz
from tests.fuzz.targets.all import SEED, TARGETS
from tests.fuzz.targets.texts import SPECS, TABLES, Texts

SECONDS = 60.0


@pytest.mark.parametrize("name", TARGETS)
def test_fuzz(name: str, tmp_path: Path) -> None:
    """The seed is fixed, so that a run can be repeated; `make fuzz` draws its own."""
    outcome = fuzz(name, seconds=SECONDS / len(TARGETS), seed=1, keep=tmp_path)
    assert outcome.findings == []
    # Whatever the table of loaders holds, none of them lives.
    assert outcome.counts["refused"] > 0 or name == "cache-slots"
    assert outcome.counts["taken"] > 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cannot-start", "no room"),
        ("crashes", "ends with SIGSEGV"),
        ("hangs", "hangs for 10 s"),
        ("lies", "a wrong byte"),
    ],
)
def test_harness_sees_what_goes_wrong(name: str, expected: str, tmp_path: Path) -> None:
    """With the input; otherwise its silence would mean nothing."""
    outcome = fuzz(name, seconds=600, seed=1, keep=tmp_path, max_findings=1, hang_s=10 if name == "hangs" else HANG_S)
    (finding,) = outcome.findings
    assert expected in finding
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes() != SEED
    assert str(kept) in finding


def test_every_reader_of_texts_takes_a_seed() -> None:
    """A reader that refuses all seeds, because it looks for another file, is not tested by their mutants."""
    with contextlib.closing(Texts()) as target:
        takers = {name for data in target.seeds() for name in target.takers(data)}
    assert takers == {"quarantine", "class table", "tuning", "state", "key map", "label", *SPECS, *TABLES}
