"""One port a node: whichever process has it answers for all, and when it ends, another one does; a file a process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import dali_pipes as dp
from dali_pipes.metrics import prometheus
from dali_pipes.metrics.figures import FIGURES
from dali_pipes.metrics.prometheus import NODE_S
from tests.dali_pipes.raw import raw
from tests.programs import wait_until

if TYPE_CHECKING:
    from prometheus_client import Metric

# A rank that serves its figures: reads all batches of an epoch, then waits to be told. When there is a file ``ended``,
# it says whether it has the port after it wrote its figures once more.
ONE_RANK = """
import sys
from pathlib import Path
import dali_pipes as dp
from dali_pipes.metrics import prometheus
from tests.dali_pipes.raw import raw
shards, rank, port, ended = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
prometheus.NODE_S = 0.1
loader = dp.loader(shards, raw, batch_size=4, device="cpu", rank=rank, world_size=2)
loader.name = "train"
served = dp.metrics.serve(port, labels={"run": "of-this-test"})
num_samples = sum(len(batch["label"]) for (batch,) in loader)
print(num_samples, served.has_port, flush=True)
update, told = served.update, []

def updated():
    is_after = ended.exists()
    update()
    if is_after and not told:
        told.append(print("after the end", served.has_port, flush=True))

served.update = updated
sys.stdin.read()
"""


def scraped(port: int) -> dict[str, Metric]:
    """What Prometheus would get, by name; fails as it does on a broken text."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def by_rank(port: int, name: str) -> dict[str, float]:
    return {sample.labels["rank"]: sample.value for sample in scraped(port)[name].samples if "run" in sample.labels}


def wait_for(samples: dict[str, float], port: int) -> None:
    """Wait until a process has the port, and all have written their figures."""

    def is_there() -> bool:
        with contextlib.suppress(OSError):
            return by_rank(port, "dali_pipes_samples") == samples
        return False

    wait_until(is_there)


@pytest.fixture
def loader(small_shards: Path) -> Iterator[dp.Loader]:
    with dp.loader(small_shards, raw, batch_size=4, device="cpu") as opened:
        opened.name = "in-the-test"
        yield opened


@contextlib.contextmanager
def started(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_ranks_share_a_port_and_survive_its_owner(small_shards: Path, closed_port: int, tmp_path: Path) -> None:
    """A killed owner leaves nothing behind: the other rank has the port once it writes again. A restarted rank joins.

    Ranks write every two seconds, as docs/how-to/watch.md says. Here they write ten times a second.

    A process that cannot answer may have the port: it is stopped, or holds Python's lock in a long call.
    """
    assert NODE_S == 2
    ended = tmp_path / "ended"
    with started(ONE_RANK, small_shards, 0, closed_port, ended) as first:
        assert told(first) == "12 True"
        first.send_signal(signal.SIGSTOP)
        with started(ONE_RANK, small_shards, 1, closed_port, ended) as second:
            assert told(second) == "11 False"
            first.send_signal(signal.SIGCONT)
            wait_for({"0": 12, "1": 11}, closed_port)
            first.kill()
            first.wait()
            ended.touch()
            assert told(second) == "after the end True"
            wait_for({"1": 11}, closed_port)
            with started(ONE_RANK, small_shards, 0, closed_port, ended) as again:
                assert told(again) == "12 False", "the port stays where it is"
                wait_for({"0": 12, "1": 11}, closed_port)


def test_figures_of_other_processes_are_given_once(
    closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lockf(file: Any, _: int) -> None:
        if file.mode != "wb":
            raise BlockingIOError

    monkeypatch.setattr(prometheus.fcntl, "lockf", lockf)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with dp.metrics.serve(closed_port) as served:
        for name in ("00000001", "00000002"):
            served.path.with_name(f"dali_pipes_{name}.prom").write_text('dali_pipes_epoch{rank="7"} 3\n')
        found = {metric.name: metric.samples for metric in served.collect()}
        assert not served.has_port
    assert [sample.value for sample in found["dali_pipes_epoch"] if sample.labels == {"rank": "7"}] == [3]
    assert "two processes serve the same labels" in caplog.text


def test_every_figure_is_served_with_its_help(loader: dp.Loader, closed_port: int) -> None:
    sum(1 for _ in loader)
    with dp.metrics.serve(closed_port, labels={"run": "a"}) as served:
        found = scraped(closed_port)
        assert served.has_port
    for figure in FIGURES:
        family = found[figure.metric.removesuffix("_total")]
        assert family.documentation == figure.help
        assert family.type == ("counter" if figure.is_counter else "gauge")
        (sample,) = [sample for sample in family.samples if sample.labels["loader"] == "in-the-test"]
        assert sample.name == figure.metric
        assert sample.labels.keys() == {"data_set", "loader", "rank", "run"}
    samples = [sample for sample in found["dali_pipes_samples"].samples if sample.labels["loader"] == "in-the-test"]
    assert samples[0].value == loader.stats()["samples"]
    with pytest.raises(OSError, match="refused"):
        scraped(closed_port)


def test_strangers_at_the_port_get_no_threads_and_no_end_of_time(
    loader: dp.Loader, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client is answered at a time; one that sends nothing, or byte after byte, is sent away, and delays no end."""
    monkeypatch.setattr(prometheus, "REQUEST_S", 3600.0)
    with dp.metrics.serve(closed_port) as served, contextlib.ExitStack() as clients:
        silent, other = (clients.enter_context(socket.create_connection(("127.0.0.1", closed_port))) for _ in range(2))
        other.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        other.settimeout(0.5)
        with pytest.raises(TimeoutError):
            other.recv(1)
        silent.close()
        other.settimeout(None)
        assert other.recv(8) == b"HTTP/1.0"
        before = served._server.answering
        clients.enter_context(socket.create_connection(("127.0.0.1", closed_port)))
        wait_until(lambda: served._server.answering is not before)
        served.close()
    with dp.metrics.serve(closed_port), contextlib.ExitStack() as clients:
        with monkeypatch.context() as brief:
            brief.setattr(prometheus, "REQUEST_S", 0.1)
            slow = clients.enter_context(socket.create_connection(("127.0.0.1", closed_port)))

            def is_over() -> bool:
                try:
                    slow.sendall(b"G")
                except OSError:
                    return True
                return False

            wait_until(is_over)
        assert "dali_pipes_epoch" in scraped(closed_port)


def test_a_second_call_replaces_the_first(loader: dp.Loader, closed_port: int) -> None:
    """As in a notebook whose cell is run again: no figure is there twice."""
    dp.metrics.serve(closed_port, labels={"run": "a"})
    with dp.metrics.serve(closed_port, labels={"run": "b"}) as served:
        runs = [sample.labels["run"] for sample in scraped(closed_port)["dali_pipes_epoch"].samples]
        assert set(runs) == {"b"}
        assert [*served.path.parent.glob("*.prom")] == [served.path]


def test_a_port_of_another_program_is_an_error_that_names_it(closed_port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", closed_port))
        other.listen()
        with pytest.raises(OSError, match=f"port {closed_port} of '127.0.0.1': another program has it"):
            dp.metrics.serve(closed_port)
    dp.metrics.serve(closed_port).close()


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"host": "192.0.2.7"}, OSError, "cannot serve at port [0-9]+ of '192.0.2.7'"),
        ({"port": 0}, ValueError, r"port must be in \[1, 65535\], got 0"),
        ({"port": 65536}, ValueError, r"port must be in \[1, 65535\]"),
        *(({"labels": {name: "x"}}, ValueError, "a label's name must") for name in ("rank", "__name__", "a-b", "")),
    ],
)
def test_arguments_that_cannot_be(changed: dict[str, Any], error: type[Exception], text: str, closed_port: int) -> None:
    with pytest.raises(error, match=text):
        dp.metrics.serve(**({"port": closed_port} | changed))


def test_it_answers_this_machine_only_unless_told(closed_port: int) -> None:
    """The default address is loopback: another machine has to be let in by name."""
    listening = f"{closed_port:04X}"
    for host, address in (("127.0.0.1", "0100007F"), ("0.0.0.0", "00000000")):
        with dp.metrics.serve(closed_port, host=host):
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
            assert f"{address}:{listening}" in {row[1] for row in rows if row[3] == "0A"}


@pytest.mark.parametrize("spoil", ["others may enter", "link"])
def test_directory_of_another_user_is_refused(
    spoil: str, tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else could read the figures, or give wrong ones."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    meeting = tmp_path / f"dali-pipes-metrics-{os.getuid()}"
    if spoil == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        meeting.symlink_to(tmp_path / "elsewhere")
    else:
        meeting.mkdir()
        meeting.chmod(0o777)
    with pytest.raises(PermissionError, match="must be a directory of this user alone"):
        dp.metrics.serve(closed_port)


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
            wait_until(lambda: samples_in(writer.path, "textfile-test") == 23)
            assert [*tmp_path.glob("*.prom")] == [writer.path], "the exporter reads *.prom, not the file being written"
    assert not [*tmp_path.iterdir()]
    writer.close()


WITH_WORKER = """
import os, signal, sys
from dali_pipes import metrics
written = metrics.write_textfile(sys.argv[1])
if worker := os.fork():
    print(worker, written.path, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
os.close(1)
signal.pause()
"""


def test_file_of_a_killed_process_goes_although_its_worker_lives(tmp_path: Path) -> None:
    """Otherwise the exporter would show a killed job's last figures for ever. Files of other programs stay."""
    (tmp_path / "dali_pipes_of_others.prom").write_text("")
    with started(WITH_WORKER, tmp_path) as job:
        worker, path = told(job).split()
        job.wait()
    try:
        assert Path(path).exists()
        with dp.metrics.write_textfile(tmp_path) as writer:
            assert {path.name for path in tmp_path.glob("*.prom")} == {writer.path.name, "dali_pipes_of_others.prom"}
    finally:
        os.kill(int(worker), signal.SIGKILL)


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match=r"name the one of the node exporter's --collector\.textfile"):
        dp.metrics.write_textfile(tmp_path / "none")
    with pytest.raises(ValueError, match="every_s must be positive"):
        dp.metrics.write_textfile(tmp_path, every_s=0)


def test_a_directory_that_goes_and_comes_back(
    small_shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer warns once, and writes again when the directory is there."""
    directory = tmp_path / "node_exporter"
    directory.mkdir()
    with (
        dp.loader(small_shards, raw, batch_size=4, device="cpu"),
        dp.metrics.write_textfile(directory, every_s=0.05) as writer,
    ):
        directory.rename(tmp_path / "away")
        wait_until(lambda: "cannot give metrics by" in caplog.text)
        update, tries = writer.update, []
        monkeypatch.setattr(writer, "update", lambda: tries.append(1) or update())
        wait_until(lambda: len(tries) > 2)
        (tmp_path / "away").rename(directory)
        writer.path.unlink()
        wait_until(writer.path.exists)
    assert caplog.text.count("trying again") == 1
