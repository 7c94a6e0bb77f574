"""Loops that were written for DALI's iterators, and for torch's loader, run unchanged."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dali_pipes as dp
from tests import loaders

if TYPE_CHECKING:
    from tests.shards import Sample

POLICIES = ("FILL", "DROP", "PARTIAL")


def open_loader(shards: Path, **options: Any) -> dp.Loader:
    usual = {"batch_size": 5, "seed": 1, "outputs": dp.Outputs()}
    usual["graph"] = dp.classification_train(crop=16, photo="image.jpg")
    return loaders.open_loader(shards, **(usual | options))


def dalis_policy(name: str) -> Any:
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy

    return LastBatchPolicy[name]


def dalis_iterator(
    files: list[str], rank: int, world_size: int, *, batch_size: int, policy: str, **options: Any
) -> Any:
    """The iterator of DALI's examples: it reads photos from files, and each rank reads one slice of the files."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator

    @pipeline_def
    def photo_files() -> Any:
        photos, labels = fn.readers.file(
            files=files, shard_id=rank, num_shards=world_size, pad_last_batch=True, name="Reader"
        )
        photos = fn.decoders.image(photos, output_type=types.RGB)
        return fn.resize(photos, resize_x=16, resize_y=16), labels

    pipeline = photo_files(batch_size=batch_size, num_threads=1, device_id=None)
    return DALIClassificationIterator(pipeline, reader_name="Reader", last_batch_policy=dalis_policy(policy), **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, small_samples: list[Sample]) -> list[str]:
    """The photos of the small shards as files."""
    folder = tmp_path_factory.mktemp("files")
    for sample in small_samples:
        (folder / f"{sample.key}.jpg").write_bytes(sample.components["image.jpg"])
    return [str(path) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize(
    ("world_size", "batch_size", "policy"),
    [
        *zip([1, 3, 1, 3, 1, 3], [4, 4, 4, 5, 5, 5], [*POLICIES, *POLICIES], strict=True),
        (2, 6, "PARTIAL"),
        # DALI refuses an epoch that DROP leaves without a batch.
        (1, 64, "FILL"),
        (1, 64, "PARTIAL"),
    ],
)
def test_sizes_are_those_of_dalis_own_iterator(
    small_shards: Path, files: list[str], world_size: int, batch_size: int, policy: str
) -> None:
    """All that published loops and wrappers look at, on every rank, as DALI has it for as many files."""
    for rank in range(world_size):
        auto_reset = bool(rank % 2)
        theirs = dalis_iterator(files, rank, world_size, batch_size=batch_size, policy=policy, auto_reset=auto_reset)
        ranks = {"rank": rank, "world_size": world_size}
        with open_loader(small_shards, batch_size=batch_size, last_batch_policy=policy, **ranks) as loader:
            ours = loader.as_dali(output_map=["data", "label"], column_labels=True, auto_reset=auto_reset)
            same = "_size size batch_size _num_gpus output_map _last_batch_policy _auto_reset"
            for name in f"{same} _reader_name _last_batch_padded".split():
                assert getattr(ours, name) == getattr(theirs, name), name
            sizes = [len(batch["label"]) for (batch,) in ours]
            assert len(sizes) == len(ours) == len(theirs)
            # With several ranks, DALI gives each rank a slice of the files. Our loader deals out each step.
            assert world_size > 1 or sizes == [len(batch["label"]) for (batch,) in theirs]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_counters_are_those_of_dalis_own_iterator(
    small_shards: Path, files: list[str], world_size: int, policy: str
) -> None:
    """After each batch and after a reset."""
    theirs = dalis_iterator(files, 0, world_size, batch_size=5, policy=policy, prepare_first_batch=False)
    with open_loader(small_shards, rank=0, world_size=world_size, last_batch_policy=policy) as loader:
        ours = loader.as_dali(prepare_first_batch=False)
        assert (ours._counter, ours._ever_consumed) == (theirs._counter, theirs._ever_consumed) == (0, False)
        for _ in zip(theirs, ours, strict=False):
            assert (ours._counter, ours._ever_consumed) == (theirs._counter, True)
        theirs.reset()
        ours.reset()
        assert ours._counter == theirs._counter == 0


def test_arguments_of_dalis_iterators_are_taken(small_shards: Path) -> None:
    """Those that say what the loader does, and those that change nothing."""
    with open_loader(small_shards, last_batch_policy="FILL") as loader:
        plain = loader.as_dali(
            reader_name="train", size=23, last_batch_policy=dalis_policy("FILL"), prepare_first_batch=False
        )
        assert plain._reader_name == "train"
        loader.as_dali(fill_last_batch=True, last_batch_padded=True, dynamic_shape=True, prepare_first_batch=True)


@pytest.mark.parametrize(
    ("opened", "options", "text"),
    [
        ("PARTIAL", {"fill_last_batch": True}, "'PARTIAL', and as_dali() got fill_last_batch=True; pas"),
        ("FILL", {"fill_last_batch": False}, "'FILL', and as_dali() got fill_last_batch=False"),
        ("FILL", {"last_batch_policy": "DROP"}, "as_dali() got last_batch_policy=LastBatchPolicy.DROP; pass the"),
        ("FILL", {"last_batch_padded": False}, "a loader gives each sample once an epoch; leave it out"),
        ("FILL", {"size": 20}, "size must be left out: this rank has 23 samples in an epoch, got 20"),
    ],
)
def test_arguments_that_contradict_the_loader_are_refused(
    small_shards: Path, opened: str, options: dict[str, Any], text: str
) -> None:
    if "last_batch_policy" in options:
        options = {"last_batch_policy": dalis_policy(options["last_batch_policy"])}
    refused = pytest.raises(ValueError, match=re.escape(text))
    with open_loader(small_shards, last_batch_policy=opened) as loader, refused:
        loader.as_dali(**options)


def test_checkpoints_point_to_the_state(small_shards: Path) -> None:
    """DALI's iterators have them since 2.0; they would not hold the position of a loader."""
    with open_loader(small_shards) as loader:
        for iterator in (loader, loader.as_dali()):
            with pytest.raises(ValueError, match=r"save state_dict\(\), and pass it to dali_pipes.loader\(state=\)"):
                iterator.checkpoints()


@pytest.mark.parametrize("policy", ["PARTIAL", "FILL", "DROP"])
def test_loop_of_dalis_imagenet_example_runs_unchanged(small_shards: Path, policy: str) -> None:
    """What it touches: the number of batches from ``_size``, labels squeezed to int64, a train and a validation loader
    that are reset after each epoch, resumed by ``start_epoch`` only.
    """

    def train(loader: Any, epoch: int) -> int:
        seen, steps = 0, []
        for i, data in enumerate(loader):
            images, target = data[0]["data"], data[0]["label"].squeeze(-1).long()
            num_batches = int(math.ceil(loader._size / batch_size))  # noqa: RUF046 (as it stands in loops that are out there)
            steps.append(epoch * num_batches + i)
            assert target.shape == (len(images),)
            seen += len(images)
        assert steps == [epoch * num_batches + i for i in range(len(loader))]
        return seen

    batch_size, rounds = 5, {"PARTIAL": 23, "FILL": 25, "DROP": 20}
    face: dict[str, Any] = {"output_map": ["data", "label"], "column_labels": True}
    evaluation = dp.classification_eval(resize=16, crop=16, photo="image.jpg")
    with (
        open_loader(small_shards, last_batch_policy=policy, batch_size=batch_size) as training,
        open_loader(small_shards, graph=evaluation, batch_size=batch_size) as validation,
    ):
        train_loader, val_loader = training.as_dali(**face), validation.as_dali(**face)
        for epoch in range(3):
            # The example counts what DROP leaves out as a batch, too; no loop is that long then.
            if policy != "DROP":
                assert train(train_loader, epoch) == rounds[policy]
            else:
                assert sum(len(data[0]["data"]) for data in train_loader) == rounds[policy]
                assert train_loader._size // batch_size == len(train_loader)
            assert sum(len(data[0]["label"]) for data in val_loader) == 23
            train_loader.reset()
            val_loader.reset()
        assert (train_loader.epoch, val_loader.epoch) == (3, 3)


def test_loop_of_a_fixed_number_of_batches_runs_unchanged(small_shards: Path) -> None:
    """``next(it)`` and ``it.next()``, across epochs, with ``auto_reset`` or a StopIteration that is caught."""
    with open_loader(small_shards) as opened:
        loader = opened.as_dali(auto_reset=True)
        seen, iterator = 0, iter(loader)
        for _ in range(2 * len(loader)):
            try:
                data = loader.next()
            except StopIteration:
                data = next(iterator)
            seen += len(data[0]["label"])
        assert seen == 2 * 23
    with open_loader(small_shards) as loader:
        seen = 0
        for _ in range(2 * len(loader)):
            try:
                data = next(loader)
            except StopIteration:
                loader.reset()
                data = next(loader)
            seen += len(data[0]["label"])
        assert seen == 2 * 23


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"output_map": ["a"]}, r"output_map must name the graph's 2 outputs \(image, label\), got \['a'\]"),
        ({"output_map": ["a", "a"]}, r"output_map must not name an output twice, got \['a', 'a'\]"),
        ({"output_map": ["a", "key"]}, "output_map must not name an output 'key', which the loader adds"),
        ({"auto_reset": "maybe"}, "auto_reset must be a bool, 'yes', 'no' or None, got 'maybe'"),
    ],
)
def test_names_that_do_not_fit_are_refused(small_shards: Path, options: dict[str, Any], text: str) -> None:
    """What was expected, what was given."""
    with open_loader(small_shards, outputs=dp.Outputs(keys=True)) as loader, pytest.raises(ValueError, match=text):
        loader.as_dali(**options)
