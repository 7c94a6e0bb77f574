"""Take the commands, files and shown outputs out of a page, run them, and compare outputs by their shape."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_END = "@ end of block"
RUN_FILE = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
"""``python -c RUN_FILE FILE ARGUMENTS`` runs a file through the fork server of the tests."""


@dataclass
class Block:
    """Commands, and what the page says that they print."""

    line: int
    commands: str
    shown: list[str] = field(default_factory=list)


def blocks_of(page: Path) -> tuple[list[Block], dict[str, str]]:
    """The page's ``bash`` blocks, each with the plain block next to it; and its files, blocks ``python NAME``."""
    blocks: list[Block] = []
    files: dict[str, str] = {}
    kind, lines, start, stop = None, [], 0, 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif kind is None:
            kind, lines, start = line[3:], [], number
        else:
            text = "\n".join(lines) + "\n"
            if kind == "bash":
                blocks.append(Block(start, text))
                stop = number
            elif kind.startswith("python "):
                files[kind.split()[1]] = text
            elif kind == "" and blocks and start <= stop + 2:
                blocks[-1].shown = lines
            kind, lines = None, []
    assert kind is None, f"{page.name}: the block of line {start} has no end"
    return blocks, files


def python_of(page: Path) -> str:
    """The page's ``python`` blocks, one after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))


def run_python(*arguments: str, folder: Path, **variables: str) -> str:
    """What Python prints with these arguments, in a process of its own with ``folder`` as its directory."""
    run = subprocess.run(
        [sys.executable, *(["-c", RUN_FILE] if arguments[0].endswith(".py") else []), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def run_blocks(page: Path, *, folder: Path, **variables: str) -> int:
    """Run the blocks of a page in order in one shell, check what they print, and return their number."""
    blocks, files = blocks_of(page)
    for name, text in files.items():
        (folder / name).write_text(text)
    script = "set -eu\n" + "".join(f"{block.commands}echo '{_END}'\n" for block in blocks)
    environment = os.environ | {
        "DALI_PIPES": str(REPOSITORY),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "XDG_DATA_HOME": str(folder / "data"),
        **variables,
    }
    environment.pop("AIS_ENDPOINT", None)
    with (folder / "printed.txt").open("wb") as stream:
        options = {"cwd": folder, "env": environment, "stdout": stream, "stderr": subprocess.STDOUT}
        shell = subprocess.Popen(["bash", "-c", script], start_new_session=True, **options)
        try:
            code = shell.wait()
        finally:
            # What a failed command left in the background, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    printed = (folder / "printed.txt").read_text().split(f"{_END}\n")
    for block, text in zip(blocks, printed, strict=False):
        missing = follows(block.shown, text)
        assert missing is None, f"{page.name}:{block.line}: shows {missing!r}, printed was:\n{text}"
    assert code == 0, printed[-1]
    assert len(printed) == len(blocks) + 1
    return len(blocks)


def follows(shown: list[str], printed: str) -> str | None:
    """The first shown line that was not printed, in order; ``None`` if all were.

    Numbers, hexadecimal words and keys may differ; ``...`` stands for any text, alone on a line for any lines.
    """
    rest = [_shape(line) for line in printed.splitlines()]
    for line in shown:
        if line.strip() == "...":
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in _shape(line).split("...")) + "$")
        place = next((number for number, candidate in enumerate(rest) if pattern.match(candidate)), None)
        if place is None:
            return line
        rest = rest[place + 1 :]
    return None


def _shape(line: str) -> str:
    line = re.sub(r"\b[0-9a-f]{12,}\b", "HEX", line)
    line = re.sub(r"\b[A-Z][a-z]+_\d+\b", "KEY", line)
    return " ".join(re.sub(r"\d+(\.\d+)?", "0", line).split())
