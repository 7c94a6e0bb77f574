"""One port a node: whichever process has it answers for all of them, and when it ends, another one does."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import dali_pipes as dp
from dali_pipes.metrics import node
from dali_pipes.metrics.figures import FIGURES
from tests.dali_pipes.metrics import one_rank
from tests.dali_pipes.raw import raw


def scraped(port: int) -> dict[str, Metric]:
    """What Prometheus would get, by name; fails as it does on a broken text."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def by_rank(port: int, name: str) -> dict[str, float]:
    return {sample.labels["rank"]: sample.value for sample in scraped(port)[name].samples if "run" in sample.labels}


@pytest.fixture
def loader(small_shards: Path) -> Iterator[dp.Loader]:
    with dp.loader(small_shards, raw, batch_size=4, device="cpu") as opened:
        opened.name = "in-the-test"
        yield opened


def start(shards: Path, rank: int, port: int) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", one_rank.__name__, str(shards), str(rank), str(port)]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_ranks_share_a_port_and_survive_its_owner(small_shards: Path, closed_port: int) -> None:
    """Killed, not closed: nothing is left behind, the other rank answers, and a rank that is started again joins."""
    ranks = [start(small_shards, rank, closed_port) for rank in range(2)]
    try:
        found = [told(process).split() for process in ranks]
        assert sorted(has_port for _, has_port in found) == ["False", "True"]
        assert [int(num) for num, _ in found] == [12, 11]
        assert by_rank(closed_port, "dali_pipes_samples") == {"0": 12, "1": 11}
        first = [has_port for _, has_port in found].index("True")
        ranks[first].kill()
        ranks[first].wait()
        deadline = time.monotonic() + 120
        while True:
            try:
                assert by_rank(closed_port, "dali_pipes_samples").keys() == {str(1 - first)}
                break
            except OSError:
                assert time.monotonic() < deadline, "nobody took the port"
                time.sleep(0.1)
        ranks[first] = start(small_shards, first, closed_port)
        assert told(ranks[first]).endswith("False"), "the port stays where it is"
        assert by_rank(closed_port, "dali_pipes_samples") == {"0": 12, "1": 11}
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_process_that_cannot_answer_may_have_the_port(small_shards: Path, closed_port: int) -> None:
    """It is stopped, or holds Python's lock in a long call: a rank that starts meanwhile must not fail for that."""
    busy = start(small_shards, 0, closed_port)
    try:
        assert told(busy).endswith("True")
        busy.send_signal(signal.SIGSTOP)
        with dp.metrics.serve(closed_port) as served:
            assert not served.has_port
            busy.send_signal(signal.SIGCONT)
            assert by_rank(closed_port, "dali_pipes_samples") == {"0": 12}
    finally:
        busy.kill()
        busy.communicate()


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


def test_a_second_call_replaces_the_first(loader: dp.Loader, closed_port: int) -> None:
    """As in a notebook whose cell is run again: no figure is there twice."""
    dp.metrics.serve(closed_port, labels={"run": "a"})
    with dp.metrics.serve(closed_port, labels={"run": "b"}):
        runs = [sample.labels["run"] for sample in scraped(closed_port)["dali_pipes_epoch"].samples]
        assert set(runs) == {"b"}


def test_a_port_of_another_program_is_an_error_that_names_it(closed_port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", closed_port))
        other.listen()
        with pytest.raises(OSError, match=f"port {closed_port} of '127.0.0.1' is taken by another program"):
            dp.metrics.serve(closed_port)
    dp.metrics.serve(closed_port).close()


def test_an_address_that_the_machine_does_not_have_is_an_error(closed_port: int) -> None:
    with pytest.raises(OSError, match=f"cannot serve at port {closed_port} of '192.0.2.7'"):
        dp.metrics.serve(closed_port, host="192.0.2.7")


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_ports_that_there_are_not(port: int) -> None:
    with pytest.raises(ValueError, match=r"port must be in \[1, 65535\]"):
        dp.metrics.serve(port)


@pytest.mark.parametrize("name", ["rank", "__name__", "a-b", ""])
def test_labels_that_prometheus_refuses(name: str, closed_port: int) -> None:
    with pytest.raises(ValueError, match="a label's name must"):
        dp.metrics.serve(closed_port, labels={name: "x"})


def test_it_answers_this_machine_only_unless_told(closed_port: int) -> None:
    """The default address is loopback: another machine has to be let in by name."""
    listening = f"{closed_port:04X}"
    for host, address in (("127.0.0.1", "0100007F"), ("0.0.0.0", "00000000")):
        with dp.metrics.serve(closed_port, host=host):
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
            assert f"{address}:{listening}" in {row[1] for row in rows if row[3] == "0A"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_neither_gets_nor_gives_figures(loader: dp.Loader, closed_port: int) -> None:
    """Another user's process can take one of our socket names, and connect to us. We neither ask nor answer it."""
    names = node._names(closed_port)
    program = (
        "import os, socket, sys\n"
        "names = sys.argv[1].split(',')\n"
        "os.setuid(65534)\n"
        "squatting = socket.socket(socket.AF_UNIX); squatting.bind('\\0' + names[1]); squatting.listen()\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "asking = socket.socket(socket.AF_UNIX); asking.connect('\\0' + names[0])\n"
        "print(len(asking.recv(99)), flush=True)\n"
        "theirs, _ = squatting.accept(); print(len(theirs.recv(99)), flush=True)\n"
        'theirs.sendall(b\'{"serves": true, "series": [[{"rank": "9"}, {"samples": 1}]]}\'); theirs.close()\n'
        "sys.stdin.readline()\n"
    )
    with dp.metrics.serve(closed_port):
        words = [sys.executable, "-c", program, ",".join(name[1:] for name in names[:2])]
        other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert other.stdin is not None
            assert told(other) == "ready"
            other.stdin.write("\n")
            other.stdin.flush()
            assert told(other) == "0"
            ranks = {sample.labels["rank"] for sample in scraped(closed_port)["dali_pipes_samples"].samples}
            assert "9" not in ranks
        finally:
            other.kill()
            other.communicate()


def test_two_jobs_of_the_same_labels_are_told_apart_or_warned_of(
    loader: dp.Loader, closed_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Prometheus refuses a series that is there twice."""
    with node.NodeMetrics(host="127.0.0.1", port=closed_port, labels=None) as one:
        two = node.NodeMetrics(host="127.0.0.1", port=closed_port, labels=None)
        try:
            assert (one.has_port, two.has_port) == (True, False)
            with caplog.at_level(logging.WARNING):
                for _ in range(2):
                    labels = [sample.labels for sample in scraped(closed_port)["dali_pipes_epoch"].samples]
                    assert len(labels) == len({tuple(sorted(one.items())) for one in labels})
            assert sum("serve the same labels" in record.message for record in caplog.records) == 1
        finally:
            two.close()


def test_a_forked_child_keeps_nothing_of_its_parent(loader: dp.Loader, closed_port: int) -> None:
    """A worker that outlives its parent must not keep the port."""
    served = dp.metrics.serve(closed_port)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.read(reading, 1)
        os._exit(0)
    try:
        served.close()
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", closed_port))
            free.listen()
    finally:
        os.write(writing, b"x")
        assert os.waitpid(child, 0)[1] == 0
        os.close(reading)
        os.close(writing)
