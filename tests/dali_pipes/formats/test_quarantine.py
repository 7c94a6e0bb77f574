"""Quarantines and lists of keys: what is written, by whom, and what is read again or refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.quarantine import Exclusion, Quarantine, read_exclusions

DIGEST = "0123456789abcdef" * 4
HEADER = "# dali-pipes quarantine, version 1, manifest 0123456789ab: shard, key, component, cause\n"


def test_quarantine_of_processes_at_the_same_time_has_whole_lines(tmp_path: Path) -> None:
    """Two processes write a hundred lines each to one file, and every line stays whole."""
    path = tmp_path / "bad.tsv"
    program = (
        "import sys\n"
        "from dali_pipes.formats.quarantine import Quarantine\n"
        "opened = Quarantine(sys.argv[1], manifest='ab')\n"
        "for row in range(100): opened.add(f's-{sys.argv[2]}.tar', f'k{row}', 'jpg', 'x' * 200)\n"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", program, path, str(number)]) for number in range(2)]
    assert [job.wait() for job in jobs] == [0] * 2
    found = {(entry.shard, entry.key) for entry in read_exclusions(path)}
    assert found == {(f"s-{number}.tar", f"k{row}") for number in range(2) for row in range(100)}
    lines = path.read_text().splitlines()
    assert {line.partition("\t")[2].count("x") for line in lines if "\t" in line} == {200}


def test_quarantine_that_cannot_be_written_is_refused_before_it_is_wanted(tmp_path: Path) -> None:
    """Errors: a missing directory, a directory as the file, a file that is no list, a key that would break a line."""
    with pytest.raises(StoreError, match=r"cannot write the quarantine '.*bad.tsv': No such .* '.*/none'; make it"):
        Quarantine(tmp_path / "none" / "bad.tsv", manifest=DIGEST)
    with pytest.raises(StoreError, match=rf"cannot read '{tmp_path}', a list of samples to leave out: Is a directory"):
        Quarantine(tmp_path, manifest=DIGEST)
    path = tmp_path / "photo.jpg"
    path.write_bytes(b"key\n\xff\xd8\xff\n")
    with pytest.raises(
        DataError, match=r"photo.jpg':2: expected UTF-8, found b'\\xff\\xd8\\xff'; is it a list of keys"
    ):
        Quarantine(path, manifest=DIGEST)
    quarantine = Quarantine(tmp_path / "bad.tsv", manifest=DIGEST)
    with pytest.raises(DataError, match=r"cannot write 'a\\tb' to the quarantine '.*': it holds a tab or a line break"):
        quarantine.add("s-0.tar", "a\tb", "jpg", "x")
    assert not quarantine.path.exists()


def test_quarantine_on_a_full_disk_says_so(tmp_path: Path) -> None:
    """A disk that takes no more, here by the limit of a file's size: the line is not taken as written."""
    program = (
        "import resource, signal, sys\n"
        "from dali_pipes.formats.quarantine import Quarantine\n"
        "opened = Quarantine(sys.argv[1], manifest='ab')\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))\n"
        "for key in ('a', 'b', 'a'):\n"
        "    try: opened.add('s-0.tar', key, 'jpg', 'x' * 90)\n"
        "    except Exception as exc: print(type(exc).__name__, exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "bad.tsv"], capture_output=True, text=True)
    first, second, third = done.stdout.splitlines()
    assert first.startswith(f"StoreError cannot write the quarantine '{tmp_path}/bad.tsv': only a part of the line")
    assert second == f"StoreError cannot write the quarantine '{tmp_path}/bad.tsv': File too large"
    assert third == second


def test_lists_of_several_kinds_are_read_in_order(tmp_path: Path) -> None:
    """Keys alone, with a shard, from Windows, with a byte order mark; notes and empty lines are none."""
    first, second = tmp_path / "keys.txt", tmp_path / "more.txt"
    first.write_bytes("\ufeffa/1\r\n\r\n# a note\r\n key with spaces \u2028x\r\n".encode())
    second.write_text("s-0.tar\tb\n#odd.tar\t#odd\n\ns-1.tar\tc\t\t\n")
    found = read_exclusions([first, str(second)])
    assert [(entry.shard, entry.key, entry.line) for entry in found] == [
        (None, "a/1", 1),
        (None, " key with spaces \u2028x", 4),
        ("s-0.tar", "b", 1),
        ("#odd.tar", "#odd", 2),
        ("s-1.tar", "c", 4),
    ]
    assert found[-1].where == f"'{second}':4"
    assert read_exclusions(first) == found[:2]
    assert read_exclusions(str(tmp_path / "k*.txt")) == found[:2]  # a rank without bad samples leaves no file
    assert read_exclusions(str(tmp_path / "none-*.txt")) == read_exclusions([]) == []
    with pytest.raises(StoreError, match=r"cannot read '.*none.tsv', a list of samples to leave out: No such file"):
        read_exclusions([tmp_path / "none.tsv"])
    with pytest.raises(StoreError, match=r"cannot read 's3://b/bad.txt', .* a file of this machine"):
        read_exclusions("s3://b/bad.txt")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a\nb\tc\td\n", r"':2: expected a key; shard and key; or shard, key, .* by tabs, found 'b\\tc\\td'; mend"),
        ("a\tb\tc\td\te\n", r"':1: expected a key; .*, found 'a\\tb\\tc\\td\\te'"),
        ("\tb\n", r"':1: expected a key; .*, found '\\tb'"),
        ("b\t\n", r"':1: expected a key; .*, found 'b\\t'"),
        (
            f"{HEADER}s-0.tar\ta\tjpg\tx\ns-1.t",
            r"':3: expected shard, key, component and cause, .*, found 's-1.t'; mend",
        ),
        (f"{HEADER}s-0.tar\ta\n", r"':2: expected shard, key, component and cause, .*, found 's-0.tar\\ta'"),
        (HEADER.replace("version 1", f"version {'1' * 5000}"), "':1: expected a dali-pipes quarantine, version 1, fou"),
        (HEADER.replace("version 1", "version 2"), "':1: expected a dali-pipes quarantine, version 1, found version 2"),
    ],
)
def test_lines_that_are_none_are_named(tmp_path: Path, text: str, found: str) -> None:
    """A line of a quarantine that was cut off is not taken for a key."""
    path = tmp_path / "bad.tsv"
    path.write_text(text)
    with pytest.raises(DataError, match=f"'{path}{found}"):
        read_exclusions(path)


def test_quarantine_file_is_made_at_once_and_gone_on_with_byte_for_byte(tmp_path: Path) -> None:
    """A list of no samples can be passed; a second run adds nothing that is there, and no second first line."""
    path = tmp_path / "bad.tsv"
    with Quarantine(path, manifest=DIGEST, made_now=True):
        assert path.read_bytes() == HEADER.encode()
    assert read_exclusions(path) == []
    for expected in (1, 0):
        with Quarantine(path, manifest=DIGEST, made_now=True) as quarantine:
            assert quarantine.add("s-0.tar", "a/é", "", "cut\toff\n here") is bool(expected)
        quarantine.close()  # a second time
    assert path.read_bytes() == HEADER.encode() + "s-0.tar\ta/é\t\tcut off here\n".encode()


def test_quarantine_file_does_not_add_to_what_may_be_no_list(tmp_path: Path) -> None:
    """A list of keys looks as any text does: it is gone on with only where that was said."""
    path = tmp_path / "keys.txt"
    path.write_text("a\nb")
    with pytest.raises(
        DataError, match=r"keys.txt' exists and is not a quarantine \(found 'a\\nb'\); name another file"
    ):
        Quarantine(path, manifest=DIGEST, made_now=True)
    with Quarantine(path, manifest=DIGEST) as quarantine:
        quarantine.add("s-0.tar", "c", "jpg", "x")
    assert path.read_bytes() == b"a\nb\n" + HEADER.encode() + b"s-0.tar\tc\tjpg\tx\n"
    assert read_exclusions(path)[2] == Exclusion("s-0.tar", "c", str(path), 4, "jpg", "x")
