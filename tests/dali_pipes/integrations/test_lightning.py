"""The data module under Lightning's own trainer: epochs, limits, validation, and checkpoints that go on bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.epoch import LoaderEpochs

pytestmark = [
    # Lightning's advice about loggers and checkpoints, and what it calls of torch's that is going to change.
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def runs() -> Any:
    """The module `lightning_runs`, imported only when a test needs it."""
    pytest.importorskip("lightning", reason="the extra 'lightning' is not installed")
    from tests.dali_pipes.integrations import lightning_runs

    return lightning_runs


def test_resumed_train_loader_is_opened_where_it_goes_on(
    runs: Any, small_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader stages nothing of epoch 0's start. A checkpoint of other data is refused. A checkpoint that was only
    tested does not change where the next fit begins.
    """
    whole = runs.fit(small_shards, tmp_path, callbacks=[runs.every_step(tmp_path)], max_epochs=1)
    begun: list[tuple[int, int]] = []
    begin = LoaderEpochs.begin

    def recorded(self: LoaderEpochs, epoch: int, *, start: int) -> None:
        begun.append((epoch, start))
        begin(self, epoch, start=start)

    monkeypatch.setattr(LoaderEpochs, "begin", recorded)
    data = runs.make_data(small_shards, val=None, test=runs.evaluation(small_shards))
    resumed = runs.fit(small_shards, tmp_path, ckpt=tmp_path / "step=2.ckpt", data=data, max_epochs=1)
    assert (resumed.steps, begun[0]) == (whole.steps[2:], (0, 10))
    runs.make_trainer(tmp_path).test(resumed, datamodule=data, ckpt_path=tmp_path / "step=2.ckpt", verbose=False)
    begun.clear()
    assert runs.fit(small_shards, tmp_path, data=data, max_epochs=1).steps == whole.steps
    assert begun[0] == (0, 0)
    other = runs.make_data(small_shards, seed=5)
    with pytest.raises(dp.StateError, match="the state has seed=4, this loader seed=5; pass the state's"):
        runs.fit(small_shards, tmp_path, ckpt=tmp_path / "step=2.ckpt", data=other, max_epochs=1)
    assert other.loaders == {}


@pytest.mark.nightly
def test_two_processes_share_each_step_and_one_goes_on(runs: Any, small_shards: Path, tmp_path: Path) -> None:
    """Started by torchrun, two processes of 3 see together what one of 6 does, without a DistributedSampler in between;
    their checkpoint goes on in one process with batches of 9, with not a sample lost or seen twice.
    """
    script = tmp_path / "program.py"
    script.write_text(
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "from tests.dali_pipes.integrations.lightning_runs import every_step, fit, make_data\n"
        "shards, folder = map(Path, sys.argv[1:])\n"
        "model = fit(shards, folder, data=make_data(shards, batch_size=3), callbacks=[every_step(folder)],\n"
        "            max_epochs=2, devices=2, strategy='ddp')\n"
        "steps = [step[:3] for step in model.steps]\n"
        "(folder / f\"rank-{os.environ['RANK']}.json\").write_text(json.dumps([steps, model.seen]))\n"
    )
    root = Path(dp.__file__).resolve().parent.parent
    started = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + [str(argument) for argument in (script, small_shards, tmp_path)],
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert started.returncode == 0, started.stderr
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    alone = runs.fit(small_shards, tmp_path, data=runs.make_data(small_shards, batch_size=6), max_epochs=2)
    together = [
        (epoch, index, one + other) for (epoch, index, one), (*_, other) in zip(*(r[0] for r in ranks), strict=True)
    ]
    assert together == [(epoch, index, keys) for epoch, index, keys, _ in alone.steps]
    assert all(
        sorted(one + other) == sorted(alone.seen["validate"][1])
        for one, other in zip(ranks[0][1]["validate"][1:], ranks[1][1]["validate"][1:], strict=True)
    )

    data = runs.make_data(small_shards, batch_size=9)
    resumed = runs.fit(small_shards, tmp_path, ckpt=tmp_path / "step=2.ckpt", data=data, max_epochs=2)
    first = [key for epoch, _, keys, _ in resumed.steps if epoch == 0 for key in keys]
    assert first == [key for epoch, index, keys, _ in alone.steps if epoch == 0 and index > 1 for key in keys]
    assert sum(len(keys) for epoch, _, keys, _ in resumed.steps if epoch == 1) == 23


def test_validation_starts_anew_each_time(runs: Any, small_shards: Path, tmp_path: Path) -> None:
    """After the sanity check's two batches, after limited ones, in each epoch: the same samples in the same order."""
    model = runs.fit(small_shards, tmp_path, max_epochs=2, limit_val_batches=3)
    keys = [f"s{number:05d}" for number in range(23)]
    assert model.seen["validate"] == [keys[:10], keys[:15], keys[:15]]
    data = runs.make_data(small_shards, val=runs.evaluation(small_shards) | {"shuffle": True, "batch_size": 4})
    model = runs.fit(small_shards, tmp_path, data=data, max_epochs=2, num_sanity_val_steps=-1)
    first = model.seen["validate"][0]
    assert sorted(first) == keys != first
    assert model.seen["validate"] == [first] * 3


def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    raise AssertionError("never traced")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, ValueError, "needs one of train, val, test, predict"),
        ({"train": {"graph": graph}}, TypeError, "train: not the arguments of dali_pipes.loader: missing.*'shards'"),
        ({"val": {"shards": "a", "graph": graph, "batchsize": 2}}, TypeError, "val: .*unexpected .*'batchsize'"),
        ({"train": {"shards": "a", "graph": graph}, "rank": 1}, ValueError, "train: the trainer gives 'rank'"),
        ({"train": {"shards": "a", "graph": graph, "state": {}}}, ValueError, "train: the trainer gives 'state'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    runs: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    """When the data module is made, not when the trainer first asks for a batch."""
    with pytest.raises(error, match=text):
        runs.DataModule(**({"batch_size": 2} | options))


def test_loader_without_a_trainer_is_refused(runs: Any, small_shards: Path) -> None:
    with pytest.raises(ValueError, match="the train loader needs a trainer, which knows its rank; pass the"):
        runs.make_data(small_shards).train_dataloader()
