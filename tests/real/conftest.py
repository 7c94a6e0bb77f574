"""The engines that images and jobs run on, prepared for the tests of this folder: `make real`.

They are not part of `make test`: they want root and apt, and write some 30 GB below one temporary directory.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from aistore import Client

from tests.deploy.dockerfile import ROOT
from tests.real.containers import Podman, build_image
from tests.real.engines import need
from tests.real.slurm import Slurm

collect_ignore_glob = [] if os.environ.get("REAL") == "1" else ["test_*.py"]
BUCKETS = {"demo", "parts", "pets", "real"}
"""What the jobs write to."""
_rows: list[tuple[str, str, str, float]] = []
_seconds: Counter[str] = Counter()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of it lies; readable for the users that containers have."""
    found = tmp_path_factory.mktemp("real")
    for path in (found, *found.parents[:2]):
        path.chmod(0o755)
    return found


@pytest.fixture(scope="session")
def podman(folder: Path) -> Iterator[Podman]:
    """Images and containers in a storage of their own."""
    need("buildah", "podman", "runc", "catatonit", "debootstrap")
    engine = Podman(folder / "containers")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def image(podman: Podman) -> str:
    """This project's image, built from the Dockerfile."""
    return build_image(podman, "ubuntu", target="runtime", name="localhost/dali-pipes:0.1.0")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = (yield).get_result()  # type: ignore[attr-defined]
    _seconds[item.nodeid] += report.duration
    if report.when == "call" or report.outcome != "passed":
        shown = (getattr(item.obj, "__doc__", None) or item.name).split("\n")[0]  # type: ignore[attr-defined]
        engines = (getattr(item, "funcargs", {}).get(name) for name in ("podman", "slurm"))
        engine = "; ".join(one.version for one in engines if one)
        found = "; ".join(str(value) for name, value in item.user_properties if name == "found")
        outcome = {"passed": found or "yes", "failed": "NO", "skipped": "not run"}[report.outcome]
        _rows.append((shown, engine, outcome, _seconds[item.nodeid]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table that deploy/README.md shows."""
    terminalreporter.write_line("\n| what was shown | on what | result | minutes |\n| --- | --- | --- | ---: |")
    for shown, engine, outcome, seconds in _rows:
        terminalreporter.write_line(f"| {shown} | {engine} | {outcome} | {seconds / 60:.1f} |")


@pytest.fixture(scope="session")
def endpoint(folder: Path) -> Iterator[str]:
    """A real AIStore, if AIS_ENDPOINT names one; else the embedded node, open to the users of containers."""
    if named := os.environ.get("AIS_ENDPOINT"):
        client = Client(named)
        found = BUCKETS & {bucket.name for bucket in client.cluster().list_buckets()}
        assert not found, f"the cluster at {named} has buckets {found}, which would be overwritten: name an empty one"
        yield named
        for bucket in BUCKETS:
            client.bucket(bucket).delete(missing_ok=True)
        return
    command = [sys.executable, "-m", "dali_pipes", "prep", "embedded", "--dir", folder / "ais", "--open"]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert node.stdout is not None
    found = node.stdout.readline().strip()
    assert found.startswith("http"), f"the embedded node ended: {node.wait()}"
    yield found
    node.terminate()
    node.communicate()


@pytest.fixture(scope="session")
def slurm(folder: Path, endpoint: str) -> Iterator[Slurm]:
    """A Slurm of two nodes on this host."""
    need("slurmctld", "slurmd", "munged", "unshare")
    cluster = Slurm(folder / "slurm", AIS_ENDPOINT=endpoint)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
