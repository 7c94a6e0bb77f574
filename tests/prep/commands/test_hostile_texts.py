"""No command sends to a terminal what the data say: results and errors show escapes."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from dali_pipes.cli import main
from tests.shards import photo_bytes, tar_bytes

EVIL = "\x1b[2J\x9b31m\nerror: \u202egpj"
"""Clears the screen, colours, begins a line that looks like ours, turns the direction of writing."""
PHOTO = photo_bytes(0, 40, 33)


def write_evil_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.write_bytes(tar_bytes(members, format=tarfile.PAX_FORMAT))
    return path


TARS = {
    "key": {f"a{EVIL}.jpg": PHOTO},
    "folder": {f"a{EVIL}/b.jpg": PHOTO, f"a{EVIL}/b.cls": b"1"},
    "component": {f"a.{EVIL}": PHOTO, "a.jpg": PHOTO},
    "component twice": {f"a.{EVIL}": b"", f"a.{EVIL.upper()}": b""},
    "label": {"a.jpg": PHOTO, "a.cls": EVIL.encode()},
    "text": {"a.jpg": EVIL.encode()},
    "outside": {f"{EVIL}": b"", "a.jpg": b"\xff\xd8\xff" + EVIL.encode()},
    "long": {f"{'x' * 100_000}.jpg": b"", f"{'x' * 100_000}.{'y' * 50_000}": b"1"},
}
COMMANDS = {
    "index": ["prep", "index", "{in}"],
    "verify": ["prep", "verify", "--decoder", "pillow", "--workers", "1", "{in}"],
    "info": ["prep", "info", "{in}"],
    "view": ["prep", "view", "{in}", "{out}.png"],
    "pack": ["prep", "pack", "tars", "{in}", "{out}", "--max-bytes", "1MiB", "--jobs", "1", "--on-bad", "skip"],
    "shuffle": ["prep", "shuffle", "{in}", "--engine", "exchange"],
    "shuffle by class": ["prep", "shuffle", "{in}", "--by", "class", "--dry-run"],
    "shuffle by content": ["prep", "shuffle", "{in}", "--algorithm", "content", "--component", "cls"],
    "transform": ["prep", "transform", "{in}", "{out}", "--function", "pets", "--jobs", "1"],
}


def run(arguments: list[str], capsys: pytest.CaptureFixture[str], **paths: Path) -> tuple[int, str]:
    """Run a command; check that all that it printed is harmless and of bounded length."""
    code = main([argument.format(**{name: str(path) for name, path in paths.items()}) for argument in arguments])
    printed = "".join(capsys.readouterr())
    for line in printed.split("\n"):
        for piece in line.split("\r"):  # a progress bar's, if there is one
            assert piece.isprintable(), piece
        assert not line.startswith("error: gpj")
        assert len(line) < 10_000
    return code, printed


@pytest.mark.parametrize("case", TARS)
def test_hostile_tars(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Members' names, components, labels and contents that would act on a terminal do not, under any command."""
    for name, command in COMMANDS.items():
        (tmp_path / name).mkdir()
        write_evil_tar(tmp_path / name / "s-0.tar", TARS[case])
        code, printed = run(command, capsys, **{"in": tmp_path / name, "out": tmp_path / f"out {name}"})
        assert printed
        assert code in (0, 1)
        assert "internal" not in printed


def test_hostile_tables_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hostile texts are columns, paths and keys of a table, and names of folders and files."""
    (tmp_path / "a.jpg").write_bytes(PHOTO)
    command = ["prep", "pack", "table", "{table}", "{out}", "--max-bytes", "1MiB", "--label", "missing"]
    for row in (f'path,"{EVIL}"\na.jpg,1\n', f'path,label\n"{EVIL}.jpg",1\n', f'path,label,key\na.jpg,1,"{EVIL}"\n'):
        (tmp_path / "t.csv").write_text(row)
        code, printed = run(command, capsys, table=tmp_path / "t.csv", out=tmp_path / "out")
        assert code in (1, 2)
        assert r"\x1b[2J" in printed or "missing" in printed
        _, printed = run([*command[:-2], "--unlabelled"], capsys, table=tmp_path / "t.csv", out=tmp_path / "out")
        assert "internal" not in printed
    folder = tmp_path / "in" / EVIL.replace("/", "")
    folder.mkdir(parents=True)
    (folder / f"{EVIL}.jpg").write_bytes(PHOTO)
    (folder / f"{EVIL}.txt").write_bytes(b"")
    _, printed = run(
        ["prep", "pack", "imagefolder", "{in}", "{out}", "--jobs", "1"],
        capsys,
        **{"in": tmp_path / "in", "out": tmp_path / "o"},
    )
    assert "internal" not in printed


def test_verbose_traceback_is_harmless(tmp_path: Path) -> None:
    """With -v, a traceback keeps its lines, and the data in it are escapes."""
    (tmp_path / "in").mkdir()
    write_evil_tar(tmp_path / "in" / "s-0.tar", TARS["label"])
    command = [sys.executable, "-m", "dali_pipes", "-v", "prep", "index", str(tmp_path / "in")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    lines = done.stderr.split("\n")
    assert "Traceback (most recent call last):" in lines
    assert all(line.isprintable() for line in lines)
