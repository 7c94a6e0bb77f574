"""``dali-pipes profile``: real epochs to stages, and stages to what is to be turned."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.cli import main
from dali_pipes.commands.profile import EpochProfile, StageTimes, find_bottleneck
from dali_pipes.commands.tune import find_graph
from tests.shards import Sample, mask_bytes, photo_bytes, write_shards

STAGES = ["fetch", "stage", "read", "inputs", "decode", "transform", "hand-over", "step"]


def an_epoch(*, wall_s: float = 10.0, first_batch_s: float = 0.1, **changed: Any) -> EpochProfile:
    """Ten seconds on four threads in which nothing is busy, but for what is given: ``read=(busy, waiting)``."""
    threads = {"fetch": 8, "stage": 8, "decode": 4, "transform": 4}
    return EpochProfile(
        epoch=1,
        num_samples=1000,
        num_batches=16,
        wall_s=wall_s,
        first_batch_s=first_batch_s,
        fetched_bytes=1 << 30,
        stages={
            name: StageTimes(
                threads=threads.get(name, 1),
                busy_s=changed.get(name.replace("-", "_"), (0.0, 0.0))[0],
                waiting_s=changed.get(name.replace("-", "_"), (0.0, 0.0))[1],
                queued_s=changed.get("queued_s", 0.0) if name == "decode" else 0.0,
            )
            for name in STAGES
        },
    )


@pytest.mark.parametrize(
    ("epoch", "bottleneck", "turn"),
    [
        (an_epoch(step=(9.8, 0.2)), "step", "nothing in the loader"),
        (an_epoch(step=(0, 10), read=(1, 8), fetch=(75, 5)), "fetch", "more fetchers"),
        # On average, one of eight fetchers is busy.
        (an_epoch(step=(0, 10), read=(1, 8), fetch=(9, 71)), "fetch", "the fetchers were not all busy"),
        (an_epoch(step=(0, 10), read=(1, 8), fetch=(5, 75), stage=(40, 40)), "stage", "Cache(directory=) in memory"),
        (an_epoch(step=(0, 10), read=(0, 8), fetch=(75, 5), first_batch_s=7.0), "fetch", "dali-pipes cache warm"),
        (an_epoch(step=(0, 10), hand_over=(0, 9), decode=(30, 1), transform=(6, 1)), "decode", "more threads, Decode("),
        (an_epoch(step=(0, 10), hand_over=(0, 9), decode=(9, 1), transform=(28, 1)), "transform", "fused operators"),
        (an_epoch(step=(0, 10), hand_over=(0, 9), decode=(12, 1), transform=(3, 1)), "decode", "Decode(queue_depth=3)"),
        (an_epoch(step=(0, 10), hand_over=(0, 9), decode=(12, 1), queued_s=20.0), "decode", "fewer threads, Decode("),
        (an_epoch(step=(0, 10), read=(8, 1), hand_over=(0, 1)), "read", "a larger batch_size"),
        (an_epoch(step=(0, 10), inputs=(8, 0), hand_over=(0, 1)), "inputs", "arrays and parsers"),
        (an_epoch(step=(0, 10), hand_over=(6, 3)), "hand-over", "Outputs(keys=False)"),
    ],
)
def test_find_bottleneck_names_what_the_step_waits_for(epoch: EpochProfile, bottleneck: str, turn: str) -> None:
    """The largest part of the waiting decides, and what is told to turn belongs to it."""
    found = find_bottleneck(epoch, cores=8, batch_size=16, on_gpu=False)
    assert found.bottleneck == bottleneck
    assert any(turn in text for text in found.turn), found.turn


def test_profile_command_measures_real_epochs(small_shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All samples of two epochs; decode and transform share the work of DALI's threads; an emulated step is busy."""
    arguments = ["profile", str(small_shards), "--crop", "24", "--batch-size", "6", "--device", "cpu"]
    settings = ["--num-threads", "1", "--prefetch-queue-depth", "3", "--compute-ms", "30"]
    assert main([*arguments, *settings, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [epoch["epoch"] for epoch in report["epochs"]] == [0, 1]
    for epoch in report["epochs"]:
        assert (epoch["num_samples"], epoch["num_batches"]) == (23, 4)
        stages = epoch["stages"]
        assert list(stages) == STAGES
        assert min(stages[name]["busy_s"] for name in ("read", "decode", "transform")) > 0
        assert stages["decode"]["threads"] == 1
        assert stages["step"]["busy_s"] >= 4 * 0.03
        in_step = stages["step"]["busy_s"] + stages["step"]["waiting_s"]
        assert in_step == pytest.approx(epoch["wall_s"])
        assert epoch["bottleneck"] in stages
        assert epoch["turn"]
    used = report["options"]
    assert (used["decoded_on_gpu"], used["prefetch_queue_depth"]) == (False, 3)


def test_command_prints_a_table_and_writes_a_trace(
    small_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each stage, and the bottleneck below; a range for each epoch, step and stage."""
    path = tmp_path / "trace.json"
    arguments = ["profile", str(small_shards), "--batch-size", "6", "--graph", "tests.dali_pipes.raw:raw"]
    assert main([*arguments, "--device", "cpu", "--epochs", "3", "-o", str(path)]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith("epoch 0: 23 samples in ")
    assert [line.split()[0] for line in lines[2:10]] == STAGES
    assert lines[10].startswith("bottleneck: ")
    assert f"wrote {path}" in said.err
    assert lines[6].split()[2] == "0.00", "the graph has no decoders"
    events = json.loads(path.read_text())["traceEvents"]
    numbers = Counter(event["name"] for event in events if event["ph"] == "X")
    assert (numbers["step"], numbers["wait for decoding"]) == (12, 12)
    assert [numbers[f"epoch {epoch}"] for epoch in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("segmentatoin", "--graph must be one of segmentation, classification_train, classification_eval, or package"),
        ("tests.dali_pipes.raw:rwa", "module 'tests.dali_pipes.raw' has no attribute 'rwa'"),
        ("tests.dali_pipes.raw:__all__", "expected a function, found list"),
        ("classification_eval", "--mask 'png' is for --graph segmentation, got --graph classification_eval"),
    ],
)
def test_find_graph_says_what_is_wrong(name: str, text: str) -> None:
    """Before anything is opened; a mask that the graph does not take would be ignored."""
    with pytest.raises(ValueError, match=text):
        find_graph(name, crop=None, photo="image.jpg", mask="png")


@pytest.mark.parametrize(
    ("command", "components", "chosen"),
    [("tune", ("jpg",), "classification_train"), ("profile", ("cls", "jpg", "png"), "segmentation")],
)
def test_graph_is_chosen_by_what_the_data_set_has(
    tmp_path: Path, command: str, components: tuple[str, ...], chosen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With masks `segmentation`; the record and a note say which."""
    data = {"cls": b"1", "jpg": photo_bytes(0, 40, 30), "png": mask_bytes(0, 40, 30)}
    samples = [Sample(f"s{i}", {name: data[name] for name in components}) for i in range(6)]
    shards = write_shards(tmp_path / "shards", samples, per_shard=3)
    options = ["--epochs", "1"] if command == "profile" else ["--seconds", "0.5", "-o", str(tmp_path / "tuning.json")]
    arguments = [command, str(shards), "--crop", "24", "--batch-size", "3", "--device", "cpu", "--json", *options]
    assert main(arguments) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert (report["options"] if command == "profile" else report["measured"]["job"])["graph"] == chosen
    masks = "masks" if chosen == "segmentation" else "no masks"
    assert told.err.count(f"graph: {chosen}, because the data set has {masks}; see --graph") == 1
