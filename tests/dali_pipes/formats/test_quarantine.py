"""The one writer of quarantines: what is there before anything is bad, and what it does not go on with."""

from pathlib import Path

import pytest

from dali_pipes.errors import DataError
from dali_pipes.formats.quarantine import Exclusion, QuarantineFile, read_exclusions

DIGEST = "0123456789abcdef" * 4
HEADER = b"# dali-pipes quarantine, version 1, manifest 0123456789ab: shard, key, component, cause\n"


def test_quarantine_file_is_made_at_once_and_gone_on_with_byte_for_byte(tmp_path: Path) -> None:
    """A list of no samples can be passed; a second run adds nothing that is there, and no second first line."""
    path = tmp_path / "bad.tsv"
    with QuarantineFile(path, manifest=DIGEST):
        assert path.read_bytes() == HEADER
    assert read_exclusions(path) == []
    for expected in (1, 0):
        with QuarantineFile(path, manifest=DIGEST) as quarantine:
            assert quarantine.add("s-0.tar", "a/é", "", "cut\toff\n here") is bool(expected)
            assert quarantine.num_added == expected
        quarantine.close()  # a second time
    assert path.read_bytes() == HEADER + "s-0.tar\ta/é\t\tcut off here\n".encode()


def test_quarantine_file_without_a_manifest_says_none(tmp_path: Path) -> None:
    QuarantineFile(tmp_path / "bad.tsv", manifest="").close()
    first = (tmp_path / "bad.tsv").read_text()
    assert first == "# dali-pipes quarantine, version 1, manifest : shard, key, component, cause\n"


def test_quarantine_file_does_not_add_to_what_may_be_no_list(tmp_path: Path) -> None:
    """A list of keys looks as any text does: it is gone on with only where that was said."""
    path = tmp_path / "keys.txt"
    path.write_text("a\nb")
    with pytest.raises(
        DataError, match=r"keys.txt' exists and is not a quarantine \(found 'a\\nb'\); name another file"
    ):
        QuarantineFile(path, manifest=DIGEST)
    with QuarantineFile(path, manifest=DIGEST, takes_lists=True, is_made=False) as quarantine:
        assert len(quarantine) == 2
        quarantine.add("s-0.tar", "c", "jpg", "x")
    assert path.read_bytes() == b"a\nb\n" + HEADER + b"s-0.tar\tc\tjpg\tx\n"
    assert read_exclusions(path)[2] == Exclusion("s-0.tar", "c", str(path), 4)


def test_quarantine_file_with_a_line_that_was_cut_off_names_it(tmp_path: Path) -> None:
    """What a loader would refuse is told by who adds to it, before a set is read."""
    path = tmp_path / "bad.tsv"
    path.write_bytes(HEADER + b"s-0.tar\ta\tjpg\tx\ns-0.t")
    with pytest.raises(DataError, match=r"bad.tsv':3: expected shard, key, .*, found 's-0.t'; mend the line"):
        QuarantineFile(path, manifest=DIGEST)
