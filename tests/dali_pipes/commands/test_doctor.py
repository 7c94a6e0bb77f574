"""What `doctor` says of machines, clusters and caches, good and bad; and what shells complete."""

import contextlib
import json
import resource
import subprocess
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.cli import main
from dali_pipes.commands.doctor import (
    Finding,
    check_caches,
    check_cluster,
    check_cores,
    check_libraries,
    check_machine,
    check_software,
    dali_builds,
    examine,
    gpu_fit,
)
from tests.servers.scripted import Visit, scripted

Monkey = pytest.MonkeyPatch
(DALI,) = dali_builds()
CUDA, OTHER = ("13", "12") if "130" in DALI else ("12", "13")

# As a cluster of AIStore 4.9 answers, recorded.
NODE = {"ais_version": "4.9.", "status": "", "snode": {"daemon_type": "proxy"}}
ANSWERS = {"health": (200, ""), "daemon?what=node_status": (200, NODE)}


@contextlib.contextmanager
def cluster(answers: Mapping[str, tuple[int, Any]], *, date: str = "") -> Iterator[str]:
    """An endpoint that gives these answers and an error to anything else: nothing else may be asked."""

    def act(visit: Visit) -> None:
        asked = visit.path.removeprefix("/v1/").replace("health?prr=true", "health")
        status, content = answers.get(asked, (500, f"not expected: {asked}"))
        data = content if isinstance(content, str) else json.dumps(content)
        visit.say(status, data.encode(), Date=date or formatdate(usegmt=True), **{"Ais-Cluster-Uptime": "1"})

    with scripted(act) as server:
        yield server.endpoint


def of(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name.startswith(name)]
    return found


def look(endpoint: str | None = None, **options: Any) -> list[Finding]:
    return examine(endpoint=endpoint, **{"environment": {}, **options})


def install(folder: Path, name: str, version: str, *, files: tuple[str, ...] = ()) -> None:
    """Make a folder look as if pip had installed a package in it; its files are not there."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


# This machine


def test_shared_memory_of_a_container(monkeypatch: Monkey) -> None:
    """The 64 MiB that runtimes give by themselves: what to start the container with."""
    monkeypatch.setattr("dali_pipes.commands.doctor.CONTAINER_SHM_BYTES", 1 << 60)
    (found,) = check_caches(Path("/dev/shm"))
    assert (found.status, found.advice) == ("warn", "a container's default: start it with --shm-size=8g or --ipc=host")


def test_no_default_directory_holds_a_cache(monkeypatch: Monkey, tmp_path: Path) -> None:
    """In /proc, the first directory, no cache file can be made. The second one is large enough, and then too small."""
    directories = [Path("/proc")]
    monkeypatch.setattr("dali_pipes.commands.doctor.default_directories", lambda: directories)
    *_, last = check_caches(None)
    assert (last.status, last.found) == ("fail", "no default directory is suitable")
    directories.append(tmp_path)
    assert [finding.status for finding in check_caches(None)] == ["warn", "ok"]
    monkeypatch.setattr("dali_pipes.commands.doctor.MIN_CACHE_BYTES", 1 << 60)
    unfit, small, _ = check_caches(None)
    assert unfit.status == small.status == "warn"
    assert small.advice == "holds few shards: free some space, or pass cache=Cache(directory=...)"


def test_dali_that_cannot_be_loaded(monkeypatch: Monkey) -> None:
    def fail(name: str) -> None:
        raise OSError(f"libcuda.so.1: cannot open shared object file,\n asked for by {name}")

    monkeypatch.setattr("importlib.import_module", fail)
    found = of(list(check_software()), "DALI")
    assert (found.status, found.advice) == ("fail", "install it again")
    assert found.found.endswith(
        "cannot be loaded: libcuda.so.1: cannot open shared object file, asked for by nvidia.dali"
    )


def test_few_open_files(monkeypatch: Monkey) -> None:
    for limit, status in ((128, "fail"), (512, "warn"), (1024, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        (found,) = [finding for finding in check_machine({}) if finding.name == "limits"]
        assert (found.status, bool(found.advice)) == (status, status != "ok")
        assert str(limit) in found.found


def test_no_build_of_dali_and_two(tmp_path: Path, monkeypatch: Monkey) -> None:
    """Two share a directory: what is imported is a mixture of both."""
    with monkeypatch.context() as without:
        without.setattr("dali_pipes.commands.doctor.dali_builds", list)
        found = of(look(), "DALI")
        assert (found.status, found.found) == ("fail", "not installed")
    for cuda in ("120", "130"):
        install(tmp_path, f"nvidia-dali-cuda{cuda}", "2.4.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = of(look(), "DALI")
    assert (found.status, found.found) == ("fail", "nvidia-dali-cuda120 2.4.0, nvidia-dali-cuda130 2.4.0")
    assert found.advice.startswith("they share one directory: pip uninstall -y nvidia-dali-cuda120 nvidia-dali-cuda130")


@pytest.mark.parametrize(
    ("package", "files", "status", "found", "advice"),
    [
        (
            f"nvidia-nvtiff-cu{OTHER}",  # beside the right one, as an upgrade leaves it
            (),
            "fail",
            f"libraries of another CUDA beside those of {DALI}: nvidia-nvtiff-cu{OTHER}",
            f"pip uninstall -y nvidia-nvtiff-cu{OTHER} && pip install --force-reinstall --no-deps nvidia-libnvcomp-cu",
        ),
        (
            f"nvidia-nvtiff-cu{CUDA}",
            ("nvidia/nvtiff/include/x.h", "nvidia/nvtiff/lib/libnvtiff.so.0"),
            "fail",
            f"without some of their files: nvidia-nvtiff-cu{CUDA}==1.0",
            f"pip install --force-reinstall --no-deps nvidia-nvtiff-cu{CUDA}==1.0",
        ),
        (
            f"nvidia-nvtiff-cu{CUDA}",
            ("nvidia/nvtiff/include/x.h",),
            "ok",
            "nvidia-",
            "",
        ),  # deploy/prune.sh deletes headers
    ],
)
def test_libraries_of_dali(
    package: str, files: tuple[str, ...], status: str, found: str, advice: str, tmp_path: Path, monkeypatch: Monkey
) -> None:
    """Builds for two CUDA versions share a directory, and uninstalling one takes files of the other away."""
    install(tmp_path, package, "1.0", files=files)
    assert check_libraries(DALI).status == "ok"
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = check_libraries(DALI)
    assert (finding.status, finding.found[: len(found)]) == (status, found)
    assert finding.advice.startswith(advice)


BUILDS = {"DALI (nvidia-dali-cuda120)": 12, "torch (13.2)": 13}


@pytest.mark.parametrize(
    ("given", "status", "text", "advice"),
    [
        ({"problem": "no libcuda", "has_driver": False}, "ok", "no NVIDIA driver; loaders run with device='cpu'", ""),
        ({"problem": "no libcuda.so.1"}, "fail", "programs cannot use it: no libcuda.so.1", "--gpus all"),
        ({"devices": []}, "warn", "none visible; the driver is for CUDA 13.0", "CUDA_VISIBLE_DEVICES"),
        ({}, "ok", "2 x H200; the driver is for CUDA 13.0", ""),
        # One major version of CUDA back: DALI's build fits, torch's does not.
        ({"supported": 12080}, "fail", "2 x H200; the driver is for CUDA 12.8, too old for torch (13.2)", "newer dr"),
        ({"builds": {"DALI (x)": 12}}, "fail", "torch was built for the CPU alone", "install a torch"),
    ],
)
def test_driver_against_builds(given: dict[str, Any], status: str, text: str, advice: str) -> None:
    """No GPU is no error; a driver that is older than what was built for it is."""
    usual: dict[str, Any] = {"devices": ["H200", "H200"], "supported": 13000, "problem": "", "has_driver": True}
    found = gpu_fit(**(usual | {"builds": BUILDS} | given))
    assert found.status == status
    assert text in found.found
    assert advice in found.advice
    assert bool(found.advice) == (status != "ok")


@pytest.mark.gpu
def test_gpu_of_this_machine(gpu: None) -> None:
    import torch

    found = of(look(), "GPU")
    assert found.status == "ok"
    assert torch.cuda.get_device_name(0) in found.found


# The cluster


@pytest.mark.parametrize(
    ("answer", "token", "status", "text", "advice"),
    [
        (ANSWERS["daemon?what=node_status"], "", "ok", "AIStore 4.9", ""),
        ((401, {"message": "token required"}), "", "fail", "refuses the request: token req", "log in (ais auth"),
        ((401, {"message": "[err: token expired]"}), "old", "fail", "[err: token", "the token in AIS_AUTHN_TOKEN has"),
        ((401, {"message": "invalid token"}), "r", "fail", "invalid", "the token in AIS_AUTHN_TOKEN is not valid"),
        # A token that may not see the cluster is a good token: a training needs no more.
        ((403, {"message": "insufficient permissions"}), "r", "ok", "of unknown version", ""),
        ((500, ""), "", "ok", "of unknown version", ""),  # the version is not made up
    ],
)
def test_cluster(answer: tuple[int, Any], token: str, status: str, text: str, advice: str, monkeypatch: Monkey) -> None:
    """By nothing but GETs."""
    monkeypatch.setenv("AIS_AUTHN_TOKEN", token)
    with cluster(ANSWERS | {"daemon?what=node_status": answer}) as endpoint:
        found = of(list(check_cluster(endpoint, {})), "endpoint")
    assert found.status == status
    assert text in found.found
    assert advice in found.advice


def test_clock_that_is_off() -> None:
    """By the date that the cluster's answers bear."""
    with cluster(ANSWERS, date="Wed, 01 Jan 2025 00:00:00 GMT") as endpoint:
        found = of(list(check_cluster(endpoint, {})), "clock")
    assert found.status == "warn"
    assert found.found.startswith("the clocks of this machine and the cluster differ by")
    with cluster(ANSWERS) as endpoint:
        assert not [finding for finding in check_cluster(endpoint, {}) if finding.name == "clock"]


def test_endpoint_that_does_not_answer(closed_port: int) -> None:
    with cluster({"health": (404, "nothing here")}) as other:
        assert "answers 404 to a health check" in of(list(check_cluster(other, {})), "endpoint").found
    for endpoint, text in (
        (f"http://127.0.0.1:{closed_port}", "no answer from AIStore at http://127.0.0.1:"),
        ("localhost:51080", "endpoint must be a URL such as http://localhost:51080, got 'localhost:51080'"),
    ):
        found = of(list(check_cluster(endpoint, {})), "endpoint")
        assert found.status == "fail"
        assert text in found.found


@pytest.mark.parametrize(
    ("endpoint", "environment", "is_warned"),
    [
        ("http://127.0.0.1:1", {"http_proxy": "http://127.0.0.1:3128"}, False),
        ("http://10.9.9.9:1", {"HTTP_PROXY": "http://u:secret@localhost:3128"}, True),
        ("http://10.9.9.9:1", {"http_proxy": "localhost:3128", "no_proxy": "10.9.9.9"}, False),
    ],
)
def test_proxies(endpoint: str, environment: dict[str, str], is_warned: bool, monkeypatch: Monkey) -> None:
    """Whether the cluster would be asked through one; a password is not shown."""
    monkeypatch.setattr("dali_pipes.store.cluster.endpoint.check_endpoint", lambda endpoint: 1 / 0)
    findings = [finding for finding in look(endpoint, environment=environment) if finding.name == "proxy"]
    assert [finding.status for finding in findings] == ["warn"] * is_warned
    for finding in findings:
        assert "secret" not in str(finding)
        assert finding.advice == "reach it directly: NO_PROXY=10.9.9.9"


# The commands


def test_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exit code 1 on a fail only; no colours where stdout is no terminal."""
    assert main(["doctor", "--endpoint", "http://127.0.0.1:1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("fail  endpoint"))
    assert lines[at + 1].strip() == "-> is it running? pass endpoint= (--endpoint), or set AIS_ENDPOINT"
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] in ("ok", "warn")
    assert set(answer["findings"][0]) == {"name", "status", "found", "advice"}
    assert main(["doctor", "--cache", str(tmp_path / "nowhere"), "--json"]) == 1


@pytest.mark.parametrize(("num", "cores", "advice"), [(64, 8, "a rank needs"), (2, 64, "bind each rank to the cores")])
def test_cores_of_ranks(num: int, cores: int, advice: str, tmp_path: Path, monkeypatch: Monkey) -> None:
    for row in range(num):
        (tmp_path / f"node{row}").touch()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert advice in str(check_cores({}, nodes=tmp_path, gpus=tmp_path))


def test_completion_prints_the_shells_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "_DALI_PIPES_COMPLETE" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_doctor_says_which_reader_the_system_allows(monkeypatch: Monkey) -> None:
    """A container's filter of system calls may forbid the quick one: loaders work, with more CPU time."""
    found = of(look(), "reader")
    assert (found.status, "one system call" in found.found) == ("ok", True)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("dali_pipes.reader.aio_reader.Aio", refuse)
    found = of(look(), "reader")
    assert found.status == "warn"
    assert "Operation not permitted" in found.found
    assert "io_submit" in found.advice
