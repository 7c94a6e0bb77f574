"""Small files that unpack to large ones, and sparse ones, are read in pieces: memory does not follow their sizes."""

import gzip
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from dali_pipes.errors import DataError
from dali_pipes.store.urls import resolve_shards
from prep.sources import tars as tars_module
from tests.shards import photo_bytes

pytestmark = pytest.mark.fresh_interpreter  # its peak of memory is measured

SIZE = 320 << 20
"""Bytes of one member, more than any of these commands may hold."""
PEAK = 256 << 20
"""A process with numpy and Pillow takes some 100 MiB."""

_PROGRAM = """
import re, sys
from dali_pipes.cli import main
code = main(sys.argv[1:])
with open("/proc/self/status") as status:
    peak = int(re.search(r"VmHWM:\\s+([0-9]+)", status.read())[1])
print("peak", peak << 10, code)
"""
# Not ru_maxrss: a child begins with the peak of its parent.


def run(*arguments: str | Path) -> tuple[int, int, str]:
    """Peak memory and exit code of a command in a process of its own, and what it printed."""
    command = [sys.executable, "-c", _PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    peak, code = done.stdout.rpartition("peak ")[2].split()
    return int(peak), int(code), done.stdout + done.stderr


def header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.USTAR_FORMAT)


def write_sparse(path: Path, *names: str) -> Path:
    """A tar of large members that begin as a photo and are zeros; the file takes a few blocks of the disk."""
    photo = photo_bytes(0, 40, 33)
    with path.open("wb") as file:
        for name in names:
            file.write(header(name, SIZE) + photo)
            file.seek(SIZE - len(photo), io.SEEK_CUR)
        file.truncate(file.tell() + 1024)
    return path


def write_bomb(path: Path, name: str) -> Path:
    """A .tgz of 330 KB with one member of 320 MiB."""
    zeros = gzip.compress(bytes(SIZE // 64), 9)
    path.write_bytes(gzip.compress(header(name, SIZE)) + zeros * 64 + gzip.compress(bytes(1024)))
    assert path.stat().st_size < 1 << 20
    return path


@pytest.mark.parametrize("name", ["a.jpg", "a.cls"])
def test_compressed_tar_is_planned_in_little_memory(tmp_path: Path, name: str) -> None:
    """Of a photo, its first bytes are read, and of others none; what cannot be packed is refused by name."""
    (tmp_path / "in").mkdir()
    write_bomb(tmp_path / "in" / "s-0.tgz", name)
    command = ("prep", "pack", "tars", tmp_path / "in", tmp_path / "out", "--max-bytes", "1GiB", "--jobs", "1")
    peak, code, text = run(*command, "--dry-run")
    assert peak < PEAK, text
    assert code == (1 if name == "a.jpg" else 0), text


def test_compressed_tar_is_shuffled_in_little_memory(tmp_path: Path) -> None:
    """Both readings, for the digests and for the copy, and the comparison afterwards."""
    (tmp_path / "in").mkdir()
    write_bomb(tmp_path / "in" / "s-0.tgz", "a.bin")
    peak, code, text = run("prep", "shuffle", tmp_path / "in", "--engine", "exchange")
    assert peak < PEAK, text
    assert code == 0, text


@pytest.mark.parametrize("name", ["a.jpg", "a.cls"])
def test_large_members_are_indexed_in_little_memory(tmp_path: Path, name: str) -> None:
    """Index reads only the front of a photo, and refuses a long label. Verify names the photo without decoding it."""
    write_sparse(tmp_path / "s-0.tar", name)
    peak, code, text = run("prep", "index", tmp_path)
    assert peak < PEAK, text
    assert code == (1 if name == "a.cls" else 0), text
    if name == "a.cls":
        assert "expected an integer" in text
        return
    for command in (("verify", "--workers", "1", "--decoder", "pillow"), ("view", "-o", tmp_path / "page.html")):
        peak, code, text = run("prep", *command, tmp_path)
        assert peak < PEAK, text
        assert (code, f"has {SIZE} bytes, a photo has at most 268435456" in text) == (1, True) or command[0] == "view"


def test_values_to_sort_by_are_bounded(tmp_path: Path) -> None:
    """The values of all samples are in memory at a time."""
    write_sparse(tmp_path / "s-0.tar", "a.txt")
    peak, code, text = run("prep", "shuffle", tmp_path, "--algorithm", "content", "--component", "txt")
    assert peak < PEAK, text
    assert code == 1
    assert f"key 'a': component 'txt' has {SIZE} bytes, samples are ordered by at most 65536" in text


def test_members_of_a_compressed_tar_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of its members is bounded; that of a plain tar is in proportion to the file."""
    monkeypatch.setattr(tars_module, "MAX_LIST_BYTES", 100_000)
    members = b"".join(header(f"{number}.txt", 0) for number in range(100)) + bytes(1024)
    for folder, name, data in (("plain", "s-0.tar", members), ("packed", "s-0.tgz", gzip.compress(members))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(data)
    plain = resolve_shards([str(tmp_path / "plain")], endpoint=None, compressed=True)
    assert len(tars_module.tars(plain, jobs=1).records) == 100
    packed = resolve_shards([str(tmp_path / "packed")], endpoint=None, compressed=True)
    with pytest.raises(DataError, match=r"shard 's-0.tgz': the list of its members takes more than 0 MiB .* gunzip it"):
        tars_module.tars(packed, jobs=1)
