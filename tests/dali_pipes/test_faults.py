"""Requests that break at random lose and double nothing: the short run of `tests.dali_pipes.fault_epochs`."""

from pathlib import Path

import pytest

from dali_pipes.store.cluster import embedded_node
from tests.dali_pipes.fault_epochs import run_epochs


@pytest.mark.parametrize("seed", [0, 1])
def test_every_sample_comes_once_though_requests_break(tmp_path: Path, seed: int) -> None:
    """Two epochs with one request in ten broken, in every way that the proxy knows."""
    with embedded_node.start(tmp_path / "node") as node:
        faults, num_requests = run_epochs(node.endpoint, tmp_path, epochs=2, rate=0.1, seed=seed)
    assert num_requests > 200
    assert len(faults) >= 5
    assert faults.total() > 10
