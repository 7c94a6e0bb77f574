"""What runs write is gone when they are, also when they were killed, and only what fits is written."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.tools.folders import RunFolder, check_room, remove_leftovers

OWNER = """
import sys
from pathlib import Path
from bench.tools.folders import RunFolder
folder = RunFolder(Path(sys.argv[1]))
(folder.new() / "shard.tar").write_bytes(bytes(1000))
print("there", flush=True)
sys.stdin.read()
"""


def test_folder_is_made_when_it_is_needed_and_goes_with_its_run(tmp_path: Path) -> None:
    """A directory for each that asks, all in one; none where nobody does."""
    with RunFolder(tmp_path) as folder:
        assert not list(tmp_path.iterdir())
        first, second = folder.new(), folder.new()
        assert first != second
        assert first.parent == second.parent
        (first / "shard.tar").write_bytes(b"1")
        assert len(list(tmp_path.iterdir())) == 1
        assert not list(second.iterdir())
    folder.close()
    assert not list(tmp_path.iterdir())


def test_leftovers_of_killed_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    """One run was killed, one goes on in another process, one in this; and a directory that is no run's."""
    other = tmp_path / "dali-pipes-bench-notes"
    other.mkdir()
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for owner in owners:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"there\n"
        known = set(tmp_path.iterdir())
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait()
        with RunFolder(tmp_path) as ours:
            ours.new()
            (removed,) = remove_leftovers(tmp_path)
            assert removed in known - {other}
            assert remove_leftovers(tmp_path) == []
            left = set(tmp_path.iterdir())
        assert known - left == {removed}
        assert other in left
        assert len(left) == 3
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
    assert len(remove_leftovers(tmp_path)) == 1, "the second was killed by now, too"


def test_room_is_what_is_free(tmp_path: Path) -> None:
    """A byte fits, and what no disk holds does not."""
    check_room(tmp_path, 1, what="it")
    with pytest.raises(ValueError, match=r"it needs 1048576\.0 TiB, and '.*' has .* free; name a directory with more"):
        check_room(tmp_path, 1 << 60, what="it")
