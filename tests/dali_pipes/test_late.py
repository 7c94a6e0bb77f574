"""A loader with ``rank="late"`` is opened when it is first needed, by the rank that the process has then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp


def open_late(shards: Path, **options: Any) -> dp.Loader:
    return dp.loader(shards, dp.segmentation(crop=16), batch_size=4, device="cpu", rank="late", **options)


RANKS = """
import json, sys, torch.distributed as d, dali_pipes as dp
rank, shards, port = int(sys.argv[1]), sys.argv[2], sys.argv[3]
graph, keys = dp.segmentation(crop=16), dp.Outputs(keys=True)
options = {'batch_size': 4, 'device': 'cpu', 'rank': 'late', 'outputs': keys}
loader, other = dp.loader(shards, graph, **options), dp.loader(shards, graph, seed=1, **options)
hasattr(loader, 'sampler'), repr(loader)
d.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=2)
length = len(loader if rank else other)  # ranks may open them in another order
keys = [key for (batch,) in loader for key in batch['key'][:loader.num_valid]]
d.barrier()
next(other)
print(json.dumps([length, keys]))
d.barrier()
d.destroy_process_group()
"""


def test_late_loader_takes_the_rank_of_a_group_that_came_after_it(small_shards: Path, closed_port: int) -> None:
    """Two real processes: 23 samples once, three batches each."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(small_shards), str(closed_port)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": str(rank)},  # as two nodes have
        )
        for rank in range(2)
    ]
    printed = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    assert [length for length, _ in printed] == [3, 3]
    keys = [key for _, read in printed for key in read]
    assert len(keys) == len(set(keys)) == 23


def test_faces_of_a_late_loader_do_not_open_it(small_shards: Path) -> None:
    """Their arguments that name outputs are checked when the graph is known: before the first batch."""
    faces: dict[str, Callable[[dp.Loader], Any]] = {
        "dicts": lambda loader: loader.as_dicts(),
        "dataset": lambda loader: loader.as_dataset(),
        "dataloader": lambda loader: loader.as_dataloader(("image", "label")),
        "dali": lambda loader: loader.as_dali(output_map=["a", "b", "label"], column_labels=True),
    }
    for open_face in faces.values():
        with open_late(small_shards) as loader:
            face = open_face(loader)
            assert not loader.is_open
            assert len(face) == len(list(face)) == 6
    with open_late(small_shards) as loader:
        face = loader.as_dali(output_map=["a"])
        with pytest.raises(ValueError, match="output_map must name the graph's 3 outputs"):
            next(face)
        assert loader.state_dict()["delivered"] == 0


def test_arguments_of_a_late_loader_are_checked_at_once(small_shards: Path, tmp_path: Path) -> None:
    for options, text in (
        ({"seed": 0.5}, "seed must be an integer"),
        ({"state": {}}, "state"),
        ({"world_size": 2}, "rank='late' finds the world size, too"),
    ):
        with pytest.raises((TypeError, ValueError, dp.StateError), match=text):
            open_late(small_shards, **options)
    with pytest.raises(ValueError, match="rank must be an integer, 'late' or None, got 'auto'"):
        dp.loader(small_shards, dp.segmentation(crop=16), batch_size=4, rank="auto")  # type: ignore[arg-type]
    with pytest.raises(dp.StoreError, match="missing"):
        open_late(tmp_path / "missing")


def test_late_loader_that_cannot_be_opened_says_why_each_time(small_shards: Path) -> None:
    """An error of the user's graph is no missing attribute of the loader; and the same loader can be tried again."""
    from nvidia.dali import fn

    is_wrong = True

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        label = components.labels if is_wrong else components.label  # type: ignore[attr-defined]
        return {"image": fn.decoders.image(components["image.jpg"]), "label": label}

    with dp.loader(small_shards, graph, batch_size=4, device="cpu", rank="late") as loader:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"the loader could not be opened: .*'labels'"):
                len(loader)
        is_wrong = False
        assert len(loader) == 6


def test_late_loader_can_be_opened_in_a_forked_child(small_shards: Path) -> None:
    """Notebooks start their ranks by a fork; each process has its own loader."""
    with open_late(small_shards) as loader:
        child = os.fork()
        if not child:
            num_samples = sum(len(batch[0]["label"]) for batch in loader)
            loader.close()
            os._exit(num_samples)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 23
        assert not loader.is_open
        assert len(loader) == 6
