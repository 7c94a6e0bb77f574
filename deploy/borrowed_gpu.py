"""Bring what `bench gpu` needs to a borrowed GPU machine in pieces, install it there offline, and run it.

The machine has Python with pip, torch, torchvision and a driver; no network; and its commands carry some 60 MB each,
while a wheel of DALI has 200 MB. So the wheels are laid out here as numbered pieces with checksums::

    python3 -m deploy.borrowed_gpu lay-out pieces --add /data/photos     # once, with a network
    python3 -m deploy.borrowed_gpu take pieces store                     # there, for each piece that arrives
    python3 -m deploy.borrowed_gpu run store -- --all -o results --shards store/files/photos

``take`` may come again with the same piece, and ``run`` again after whatever ended it: what is done is not done again.
The packages go into an environment of their own, which also sees what the machine's Python has. The standard library is
enough for this file, which runs in the root of a checkout.
"""

import argparse
import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deploy.requirements import ROOT, requirements

__all__ = ["install", "join", "lay_out", "main", "take"]

PIECE_BYTES = 58_000_000
"""Below 60 MB, and with the checkout below 64 MiB."""
LAYOUT = "layout.json"
BUFFER_BYTES = 1 << 20
# Wheels that pip may take for a Linux of 2018 or later. pip matches each tag by itself.
PLATFORMS = ("2_28", "2_27", "2_17", "2014", "2010", "1")
HAS = "torch,torchvision"
"""Packages that the machine has; their own needs, CUDA's libraries among them, are most of the gigabytes."""


class BorrowedGpuError(Exception):
    """A piece is missing or damaged, or a program failed; the text says what to do."""


def lay_out(files: Sequence[tuple[str, Path]], target: Path, *, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Write files one after another into pieces of at most ``piece_bytes``, and ``layout.json`` with all checksums.

    Args:
        files: Name in the store, such as ``wheels/numpy.whl``, and path.
        target: A directory; pieces that are there are removed.
        piece_bytes: At least 1.

    Returns:
        The pieces, in their order.
    """
    if piece_bytes < 1:
        raise ValueError(f"piece_bytes must be at least 1, got {piece_bytes}")
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("piece-*"):
        old.unlink()
    listed: list[dict[str, Any]] = []

    def chunks() -> Iterator[bytes]:
        for name, path in files:
            digest, size = hashlib.sha256(), 0
            with path.open("rb") as stream:
                while chunk := stream.read(BUFFER_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                    yield chunk
            listed.append({"name": name, "bytes": size, "sha256": digest.hexdigest()})

    pieces: list[Path] = []
    left = 0
    for chunk in chunks():
        while chunk:
            if not left:
                pieces.append(target / f"piece-{len(pieces):03d}")
                left = piece_bytes
            with pieces[-1].open("ab") as out:
                out.write(chunk[:left])
            chunk, left = chunk[left:], max(0, left - len(chunk))
    named = [{"name": piece.name, "bytes": piece.stat().st_size, "sha256": _sha256(piece)} for piece in pieces]
    (target / LAYOUT).write_text(json.dumps({"files": listed, "pieces": named}, indent=1) + "\n")
    return pieces


def take(source: Path, store: Path) -> list[str]:
    """Copy the pieces that have arrived in ``source`` into ``store``, and return the names of those still missing.

    Raises:
        BorrowedGpuError: If a piece that arrived is damaged, or the store holds another layout.
    """
    layout = _read_layout(source)
    store.mkdir(parents=True, exist_ok=True)
    if (store / LAYOUT).exists() and _read_layout(store) != layout:
        raise BorrowedGpuError(f"'{store}' holds pieces of another layout; name another directory, or delete it")
    _copy(source / LAYOUT, store / LAYOUT)
    missing = []
    for piece in layout["pieces"]:
        arrived, kept = source / piece["name"], store / piece["name"]
        if not kept.exists():
            if not arrived.exists():
                missing.append(piece["name"])
                continue
            _check(arrived, piece)
            _copy(arrived, kept)
    return missing


def join(store: Path) -> list[Path]:
    """Write the files of a layout into ``store/files`` and return them; files that are there already are kept.

    Raises:
        BorrowedGpuError: If pieces are missing, or a checksum is wrong.
    """
    layout = _read_layout(store)
    paths = [store / "files" / file["name"] for file in layout["files"]]
    if all(path.exists() for path in paths):
        return paths
    if missing := [piece["name"] for piece in layout["pieces"] if not (store / piece["name"]).exists()]:
        raise BorrowedGpuError(f"'{store}' lacks {', '.join(missing)}; bring them: take PIECES {store}")
    rest = _bytes_of([store / piece["name"] for piece in layout["pieces"]])
    chunk = b""
    for file, path in zip(layout["files"], paths, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        left, partial = file["bytes"], path.with_name(f"{path.name}.partial")
        with partial.open("wb") as out:
            while left:
                chunk = chunk or next(rest)
                out.write(chunk[:left])
                chunk, left = chunk[left:], max(0, left - len(chunk))
        _check(partial, file)
        partial.rename(path)
    return paths


def install(store: Path) -> Path:
    """Install the wheels of a store into an environment in it, without a network, and return the environment's Python.

    The environment sees the packages of the running Python, after its own. An installation that is complete is kept.

    Raises:
        BorrowedGpuError: If pieces are missing or pip fails.
    """
    paths = join(store)
    environment, done = store / "environment", store / "installed"
    python = environment / "bin" / "python"
    if done.exists():
        return python
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, with_pip=False, system_site_packages=True)
    # The running Python may be an environment itself, which the new one does not look into.
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "machine.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    names = [path.name for path in paths if path.parent.name == "requirements"]
    wheels = store / "files" / "wheels"
    for name in names:
        _run(
            [
                *(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"),
                *("--disable-pip-version-check", "--find-links", str(wheels)),
                *("--requirement", str(store / "files" / "requirements" / name)),
            ],
            hint="pip on this machine must be 22.3 or later, and its Python the version that --python named",
        )
    done.touch()
    return python


def _download(target: Path, *, python: str, without: Sequence[str], wheels: Path | None) -> list[tuple[str, Path]]:
    """Fetch the wheels of `bench gpu` for another machine, unless ``wheels`` has them; returns what is laid out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [
        line
        for line in requirements(project, extras=["gpu-bench"], cuda="13")
        if not any(line.startswith(name) and not line[len(name) :][:1].isalnum() for name in without)
    ]
    listed = target / "gpu-bench.txt"
    listed.write_text("".join(f"{line}\n" for line in needed))
    if wheels is None:
        wheels = target / "wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(wheels)]
        command += ["--python-version", python, "--implementation", "cp", "--requirement", str(listed)]
        command += ["--constraint", str(ROOT / "constraints.txt"), "--constraint", str(ROOT / "deploy" / "cuda13.txt")]
        for tag in PLATFORMS:
            command += ["--platform", f"manylinux{'_' if '_' in tag else ''}{tag}_x86_64"]
        _run(command, hint="lay-out needs a network, or --wheels DIR")
    return [
        ("requirements/gpu-bench.txt", listed),
        *((f"wheels/{path.name}", path) for path in sorted(wheels.glob("*.whl"))),
    ]


def _added(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return files, and the files of directories, such as shards; they arrive under the last part of their path.

    Raises:
        BorrowedGpuError: If a path is neither.
    """
    if missing := [path for path in paths if not path.exists()]:
        raise BorrowedGpuError(f"--add '{missing[0]}': no such file or directory")
    return [
        (str(file.relative_to(path.parent)), file)
        for path in paths
        for file in ([path] if path.is_file() else sorted(path.rglob("*")))
        if file.is_file()
    ]


def _copy(source: Path, target: Path) -> None:
    """Copy a file as a whole or not at all."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.copyfile(source, partial)
    partial.rename(target)


def _bytes_of(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as stream:
            while chunk := stream.read(BUFFER_BYTES):
                yield chunk


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check(path: Path, listed: dict[str, Any]) -> None:
    if (size := path.stat().st_size) != listed["bytes"] or _sha256(path) != listed["sha256"]:
        raise BorrowedGpuError(
            f"'{path}': expected {listed['bytes']} bytes with SHA-256 {listed['sha256'][:12]}..., found {size} bytes "
            "with another checksum; delete it and bring it again"
        )


def _read_layout(directory: Path) -> dict[str, Any]:
    try:
        layout: dict[str, Any] = json.loads((directory / LAYOUT).read_text())
    except FileNotFoundError:
        raise BorrowedGpuError(
            f"'{directory}' holds no {LAYOUT}; `lay-out` writes it, and each piece needs it"
        ) from None
    return layout


def _run(command: Sequence[str], *, hint: str) -> None:
    if subprocess.run(command, check=False).returncode:  # noqa: S603 (our own command)
        raise BorrowedGpuError(f"failed: {' '.join(command[:5])} ...; {hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands ``lay-out``, ``take`` and ``run``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("lay-out", help="Download wheels and write pieces.")
    command.add_argument("pieces", type=Path, help="Directory for the pieces.")
    command.add_argument("--add", type=Path, action="append", default=[], help="A file or directory to bring, too.")
    command.add_argument("--python", default="3.12", help="The machine's Python.  [default: 3.12]")
    command.add_argument("--without", default=HAS, help=f"Packages that the machine has.  [default: {HAS}]")
    command.add_argument("--wheels", type=Path, help="Lay out these wheels; download none.")
    command.add_argument("--piece-bytes", type=int, default=PIECE_BYTES, help=f"[default: {PIECE_BYTES}]")
    command = commands.add_parser("take", help="Keep the pieces that have arrived; say which are missing.")
    command.add_argument("pieces", type=Path, help="Directory with the layout and some pieces.")
    command.add_argument("store", type=Path, help="Directory that stays between commands.")
    command = commands.add_parser("run", help="Install what has been taken, and run `bench gpu` with these arguments.")
    command.add_argument("store", type=Path)
    command.add_argument("arguments", nargs="*", help="After --: arguments of `dali-pipes bench gpu`.")
    given = parser.parse_args(argv)
    try:
        if given.command == "lay-out":
            with tempfile.TemporaryDirectory() as directory:
                without = given.without.split(",")
                files = _download(Path(directory), python=given.python, without=without, wheels=given.wheels)
                pieces = lay_out([*files, *_added(given.add)], given.pieces, piece_bytes=given.piece_bytes)
            total = sum(piece.stat().st_size for piece in pieces)
            sys.stdout.write(f"wrote {len(files) - 1} wheels, {total / 1e6:.0f} MB, in {len(pieces)} pieces\n")
        elif given.command == "take":
            missing = take(given.pieces, given.store)
            sys.stdout.write(f"missing: {', '.join(missing)}\n" if missing else "all pieces are there\n")
        else:
            python = install(given.store)
            sys.stdout.flush()
            os.execv(python, [str(python), "-m", "dali_pipes", "bench", "gpu", *given.arguments])  # noqa: S606 (no shell)
    except BorrowedGpuError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
