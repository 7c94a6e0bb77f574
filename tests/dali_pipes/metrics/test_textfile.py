"""A file for the node exporter: always complete, readable by the exporter, and removed when its process ends."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import dali_pipes as dp
from tests.dali_pipes.raw import raw

LEAVE = """
import os, signal, sys
from dali_pipes import metrics
print(metrics.write_textfile(sys.argv[1]).path.name, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def samples_in(path: Path, loader: str) -> float:
    families = {one.name: one for one in text_string_to_metric_families(path.read_text())}
    found = {sample.labels["loader"]: sample.value for sample in families["dali_pipes_samples"].samples}
    return found[loader]


def test_the_file_follows_the_loader_and_is_removed(small_shards: Path, tmp_path: Path) -> None:
    with dp.loader(small_shards, raw, batch_size=4, device="cpu") as loader:
        loader.name = "textfile-test"
        with dp.metrics.write_textfile(tmp_path, every_s=0.01, labels={"run": "a"}) as writer:
            assert writer.path.parent == tmp_path
            assert stat.S_IMODE(writer.path.stat().st_mode) == 0o644
            sum(1 for _ in loader)
            deadline = time.monotonic() + 120
            while samples_in(writer.path, "textfile-test") != 23:
                assert time.monotonic() < deadline
            assert [path.name for path in tmp_path.glob("*.prom")] == ["dali_pipes_0.prom"]
    assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")]
    writer.close()


def test_processes_have_files_of_their_own(tmp_path: Path) -> None:
    with dp.metrics.write_textfile(tmp_path) as one, dp.metrics.write_textfile(tmp_path) as two:
        assert one.path != two.path
        one.close()
        with dp.metrics.write_textfile(tmp_path) as three:
            assert three.path == one.path


@pytest.mark.parametrize(("end", "left"), [("returns", 0), ("killed", 1)])
def test_files_of_ended_processes_do_not_stay(end: str, left: int, tmp_path: Path) -> None:
    """The exporter would show the last figures of a killed job for ever."""
    done = subprocess.run([sys.executable, "-c", LEAVE, tmp_path, end], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "dali_pipes_0.prom"
    assert len(list(tmp_path.glob("*.prom"))) == left
    with dp.metrics.write_textfile(tmp_path) as writer:
        assert list(tmp_path.glob("*.prom")) == [writer.path]


FORK = """
import os, signal, sys
from dali_pipes import metrics
written = metrics.write_textfile(sys.argv[1])
if worker := os.fork():
    print(worker, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
os.close(1)
signal.pause()
"""


def test_file_of_a_killed_process_goes_although_its_worker_lives(tmp_path: Path) -> None:
    """A forked child inherits the descriptor of the lock. Files of other programs stay."""
    (tmp_path / "dali_pipes_of_others.prom").write_text("")
    done = subprocess.run([sys.executable, "-c", FORK, tmp_path], stdout=subprocess.PIPE, text=True, check=False)
    worker = int(done.stdout)
    try:
        assert (tmp_path / "dali_pipes_0.prom").exists()
        with dp.metrics.write_textfile(tmp_path) as writer:
            assert {path.name for path in tmp_path.glob("*.prom")} == {writer.path.name, "dali_pipes_of_others.prom"}
            assert writer.path.name == "dali_pipes_0.prom"
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match=r"name the one of the node exporter's --collector\.textfile"):
        dp.metrics.write_textfile(tmp_path / "none")
    with pytest.raises(ValueError, match="every_s must be positive"):
        dp.metrics.write_textfile(tmp_path, every_s=0)


def test_a_link_in_a_names_place_is_not_followed(tmp_path: Path) -> None:
    """A directory in which others may write, too."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    directory = tmp_path / "textfiles"
    directory.mkdir()
    (directory / "dali_pipes_0.prom").symlink_to(victim)
    (directory / ".dali_pipes_1.lock").symlink_to(victim)
    with dp.metrics.write_textfile(directory), pytest.raises(OSError, match="symbolic links"):
        dp.metrics.write_textfile(directory)
    assert victim.read_text() == "mine"
    assert os.path.lexists(directory / ".dali_pipes_1.lock")
