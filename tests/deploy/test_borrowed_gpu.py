"""The way to a borrowed machine: pieces with checksums, taken in any order, installed without a network."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from deploy.borrowed_gpu import LAYOUT, BorrowedGpuError, install, join, lay_out, main, take

PACKAGE = "dalipipestrial"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A directory with the wheel of a package that nobody has; it asks the machine's Python for numpy."""
    (directory := tmp_path / "wheels").mkdir()
    info = f"{PACKAGE}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{PACKAGE}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{PACKAGE}.py", "import numpy\nWHERE = numpy.__file__\n")
        required = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\nRequires-Dist: numpy\n"
        wheel.writestr(f"{info}/METADATA", required)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in wheel.namelist()))
    return directory


def files_of(directory: Path, *sizes: int) -> list[tuple[str, Path]]:
    """Files of these sizes."""
    directory.mkdir(exist_ok=True)
    paths = [directory / f"{number}.bin" for number in range(len(sizes))]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        path.write_bytes(bytes((number + at) % 251 for at in range(size)))
    return [(f"data/{path.name}", path) for path in paths]


def test_what_is_laid_out_is_joined_again(tmp_path: Path) -> None:
    """Pieces may be taken in any order, one at a time, and again."""
    # One file spans pieces, one piece holds several files, one file is empty, and a piece exceeds the read buffer.
    files = files_of(tmp_path / "files", 10, 25, 0, 3_000_000, 5)
    pieces = lay_out(files, tmp_path / "pieces", piece_bytes=1_500_000)
    assert [piece.stat().st_size for piece in pieces] == [1_500_000, 1_500_000, 40]
    for number, piece in enumerate(reversed(pieces)):
        arrived = tmp_path / f"arrived{number}"
        arrived.mkdir()
        for path in (piece, tmp_path / "pieces" / LAYOUT):
            (arrived / path.name).write_bytes(path.read_bytes())
        assert len(take(arrived, tmp_path / "store")) == len(pieces) - number - 1
        assert len(take(arrived, tmp_path / "store")) == len(pieces) - number - 1
    take(tmp_path / "pieces", tmp_path / "store")
    joined = join(tmp_path / "store")
    assert [path.read_bytes() for path in joined] == [path.read_bytes() for _, path in files]
    before = [path.stat().st_mtime_ns for path in joined]
    assert [path.stat().st_mtime_ns for path in join(tmp_path / "store")] == before


def test_damaged_and_missing_pieces_are_named(tmp_path: Path) -> None:
    """A damaged piece is not kept; what was cut short is written anew."""
    pieces, store = tmp_path / "pieces", tmp_path / "store"
    lay_out(files_of(tmp_path / "files", 40), pieces, piece_bytes=16)
    (pieces / "piece-001").rename(tmp_path / "later")
    assert take(pieces, store) == ["piece-001"]
    with pytest.raises(BorrowedGpuError, match=r"lacks piece-001; bring them: take PIECES"):
        join(store)
    (pieces / "piece-001").write_bytes(b"\0" * 16)
    with pytest.raises(BorrowedGpuError, match=r"piece-001': expected 16 bytes with SHA-256 .* found 16 bytes"):
        take(pieces, store)
    (tmp_path / "later").rename(pieces / "piece-001")
    assert take(pieces, store) == []
    (store / "piece-002").write_bytes(b"\0" * 8)
    with pytest.raises(BorrowedGpuError, match=r"0.bin.partial': expected 40 bytes"):
        join(store)


def test_an_environment_is_installed_without_a_network(wheels: Path, tmp_path: Path) -> None:
    """It has the wheels, and sees the machine's packages. It is installed once, and anew if that was cut short."""
    listed = tmp_path / "list.txt"
    listed.write_text(f"{PACKAGE}>=1\n")
    (wheel,) = wheels.iterdir()
    lay_out([("requirements/list.txt", listed), (f"wheels/{wheel.name}", wheel)], tmp_path / "pieces", piece_bytes=200)
    store = tmp_path / "store"
    take(tmp_path / "pieces", store)
    (store / "environment").mkdir()
    (store / "environment" / "half").touch()
    python = install(store)
    assert not (store / "environment" / "half").exists()
    code = f"import {PACKAGE}, sys; print({PACKAGE}.__file__, {PACKAGE}.WHERE, sys.prefix)"
    where, numpy, prefix = subprocess.check_output([python, "-c", code], text=True).split()
    assert where.startswith(prefix)
    assert prefix == str(store / "environment")
    assert not numpy.startswith(prefix)
    before = Path(where).stat().st_mtime_ns
    assert install(store) == python
    assert Path(where).stat().st_mtime_ns == before


def test_commands_lay_out_and_take(wheels: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The list of requirements has DALI for CUDA 13, and not what the machine has."""
    files_of(tmp_path / "shards", 30, 40)
    pieces, store = str(tmp_path / "pieces"), str(tmp_path / "store")
    added = ("--add", str(tmp_path / "shards"), "--add", str(tmp_path / "shards" / "1.bin"))
    assert main(["lay-out", pieces, "--wheels", str(wheels), "--piece-bytes", "500", *added]) == 0
    num_pieces = len(list((tmp_path / "pieces").glob("piece-*")))
    assert f"wrote 1 wheels, 0 MB, in {num_pieces} pieces" in capfd.readouterr().out
    assert main(["take", pieces, store]) == 0
    assert capfd.readouterr().out == "all pieces are there\n"
    names = [str(path.relative_to(tmp_path / "store" / "files")) for path in join(tmp_path / "store")]
    assert names[2:] == ["shards/0.bin", "shards/1.bin", "1.bin"]
    needed = (tmp_path / "store" / "files" / "requirements" / "gpu-bench.txt").read_text().splitlines()
    assert any(line.startswith("nvidia-dali-cuda130") for line in needed)
    assert not any(line.startswith("torch") for line in needed)
    assert any(line.startswith("matplotlib") for line in needed)
    assert main(["take", str(tmp_path / "none"), store]) == 1
    assert "holds no layout.json" in capfd.readouterr().err
