"""Test loaders in loops: kept batches do not change; labels, ``repr`` and the end of the program."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests import loaders
from tests.shards import Sample, make_samples, write_shards, write_tar

open_loader = partial(loaders.open_loader, batch_size=5)


def test_batches_can_be_held(small_shards: Path) -> None:
    """Tensors of earlier batches stay as they were while later ones are made."""
    import torch

    with open_loader(small_shards, seed=1) as loader:
        held = [batch for (batch,) in loader]
    with open_loader(small_shards, seed=1) as loader:
        for kept, (batch,) in zip(held, loader, strict=True):
            assert torch.equal(kept["image"], batch["image"])


def test_shard_that_could_not_be_read_is_tried_again(tmp_path: Path) -> None:
    """The error is raised once, then the epoch goes on where it stopped. A broken link stands for the missing shard."""
    shards = write_shards(tmp_path, make_samples([(30, 30)] * 6), per_shard=3)
    path = tmp_path / "s-000001.tar"
    path.rename(tmp_path / "hidden")
    path.symlink_to(tmp_path / "nowhere")
    own = dp.Cache(directory=tmp_path)
    with open_loader(shards / "s-{000000..000001}.tar", batch_size=3, shuffle=False, cache=own) as loader:
        seen = loaders.keys_of([next(loader)])
        with pytest.raises(dp.StoreError, match=r"s-000001.tar"):
            next(loader)
        path.unlink()
        (tmp_path / "hidden").rename(path)
        assert seen + loaders.keys_of(loader) == [f"s{number:05d}" for number in range(6)]


def test_labels_contiguous_count_from_zero(tmp_path: Path) -> None:
    """Class ids 10, 20, 30 of the class table become 0, 1, 2."""
    made = make_samples([(20, 20)] * 6)
    samples = [Sample(f"k{i}", one.components | {"cls": b"%d0" % (i % 3 + 1)}) for i, one in enumerate(made)]
    write_tar(tmp_path / "x-0.tar", samples)
    shards = resolve_shards(tmp_path, endpoint=None)
    opened = partial(open_loader, tmp_path, batch_size=6, shuffle=False)
    index_shards(shards, classes={10: "a", 20: "b", 30: "c"})
    for labels, expected in (("raw", [10, 20, 30] * 2), ("contiguous", [0, 1, 2] * 2)):
        with opened(outputs=dp.Outputs(labels=labels)) as loader:
            assert next(loader)[0]["label"].tolist() == expected
            assert loader.classes == dict(zip(expected, "abc", strict=False))
    with pytest.raises(ValueError, match="counts the class ids of the component 'cls' anew, and the graph takes no l"):
        opened(lambda components, _: {"size": components["image.jpg"].shape()}, outputs=dp.Outputs(labels="contiguous"))


@pytest.mark.fresh_interpreter
@pytest.mark.parametrize("kept", ["", "dp.kept = loader"])
def test_program_that_ends_with_a_loader_open_says_nothing_and_does_not_wait_for_its_shards(
    tmp_path: Path, kept: str
) -> None:
    """The process ends at once although 19 of 20 shards are not fetched; also if Python clears the holder last."""
    shards = write_shards(tmp_path, make_samples([(16, 16)] * 20), per_shard=1)
    program = (
        "import sys, threading, time\nimport dali_pipes as dp\nfrom dali_pipes.store.local import LocalFetcher\n"
        "original, given, never = LocalFetcher.fetch, [], threading.Event()\n"
        "def slow(self, wanted, *, stopped, num_connections):\n"
        "    first = [one for one in wanted if 's-000000' in one.name]\n"
        "    done = original(self, first, stopped=stopped)\n"
        "    if len(first) == len(wanted): return done\n"
        "    while not given: stopped(); time.sleep(0.01)\n"  # it may have the first shard, too
        "    never.wait()\n"
        "LocalFetcher.fetch = slow\n"
        "own = {'cache': dp.Cache(directory=sys.argv[1]), 'device': 'cpu'}\n"
        "loader = dp.loader(sys.argv[1], dp.segmentation(crop=16), batch_size=1, shuffle=False, **own)\n"
        f"given.append(next(loader)); print(len(given[0]))\n{kept}"
    )
    done = subprocess.run([sys.executable, "-c", program, shards], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.fresh_interpreter
def test_program_that_ends_while_a_daemon_thread_iterates_says_nothing(small_shards: Path) -> None:
    """DALI ends its pipelines under the thread."""
    program = (
        "import sys, threading\nimport dali_pipes as dp\n"
        "loader = dp.loader(sys.argv[1], dp.segmentation(crop=16), batch_size=2, device='cpu')\n"
        "begun = threading.Event()\n"
        "def work():\n"
        "    for _ in range(10**6):\n"
        "        for batch in loader: begun.set()\n"
        "threading.Thread(target=work, daemon=True).start(); begun.wait()"
    )
    done = subprocess.run([sys.executable, "-c", program, small_shards], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_collecting_a_dropped_loader_in_a_forked_child_does_not_hang(small_shards: Path) -> None:
    """The child has none of the pipeline's threads, and must not wait for them."""
    program = (
        "import sys, os, gc\nimport dali_pipes as dp\n"
        "loader = dp.loader(sys.argv[1], dp.segmentation(crop=16), batch_size=5, device='cpu'); next(loader)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    del loader; gc.collect(); os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(list(loader)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, small_shards], capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["7", "4"], done.stderr
