"""JAX: arrays on one device and over a mesh, of one process and of two."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali import types

import dali_pipes as dp
from tests.docs.pages import REPOSITORY
from tests.programs import free_port
from tests.shards import make_samples, write_shards
from tests.trainers.ranks import join_jax, need, run_ranks
from tests.trainers.tiny import BATCH_SIZE, EVEN, NUM_EPOCHS, NUM_SAMPLES, open_loader

need("jax", "flax", "optax")


def rows_over(*shape: int, split: Any = "data") -> Any:
    """A sharding of the first axis over ``data``, on a mesh of all devices: ``data``, or ``data`` and ``model``."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "model")[: len(shape)])
    return NamedSharding(mesh, PartitionSpec(split))


def plain_batches(shards: Path, **options: Any) -> list[dict[str, Any]]:
    """An epoch as torch tensors."""
    with open_loader(shards, **options) as loader:
        return [{**batch} for batch in loader.as_dicts()]


def assert_same(arrays: Any, batch: dict[str, Any]) -> None:
    assert arrays.keys() == batch.keys()
    for name, output in batch.items():
        if name == "key":
            assert arrays[name] == output
        else:
            np.testing.assert_array_equal(np.asarray(arrays[name]), output.numpy())


# Checks of one process that has four devices.


def check_batches_are_those_of_the_loader(shards: Path, folder: Path) -> None:
    """Same values; keys beside them; labels of 32 bits; names and order as ``outputs`` says."""
    with open_loader(shards) as loader:
        batches = loader.as_jax()
        assert len(batches) == 8
        for arrays, batch in zip(batches, plain_batches(shards), strict=True):
            assert_same(arrays, batch)
            assert (arrays["image"].dtype, arrays["label"].dtype) == ("float32", "int32")
        images, keys = next(iter(loader.as_jax(("image", "key"))))
        assert (images.shape, len(keys)) == ((BATCH_SIZE, 3, 16, 16), BATCH_SIZE)
        assert set(next(iter(loader.as_jax({"x": "image"})))) == {"x"}


def check_arrays_are_not_copied(shards: Path, folder: Path) -> None:
    """On one device, and on the device of a mesh of one."""
    import jax
    from jax.sharding import SingleDeviceSharding

    with open_loader(shards, **EVEN) as loader:
        for sharding in (None, SingleDeviceSharding(jax.devices()[0])):
            form = loader.as_jax(sharding=sharding).check_outputs()
            place, arrays = loader.delivery.next_batch(
                lambda batch, form=form: (batch["image"].data_ptr(), form(batch)), taker="test"
            )
            assert arrays["image"].unsafe_buffer_pointer() == place


def check_arrays_outlive_their_batches(shards: Path, folder: Path) -> None:
    """All arrays of three epochs, held while the loader reuses what was dropped, and after it is closed."""
    import jax

    held: list[Any] = []
    with open_loader(shards) as loader:
        batches = loader.as_jax(("image",))
        for _ in range(NUM_EPOCHS):
            for (images,) in batches:
                held.append(images)
                jax.jit(lambda x: x + 1)(images).block_until_ready()
                gc.collect()
    gc.collect()
    expected = []
    with open_loader(shards) as loader:
        for _ in range(NUM_EPOCHS):
            expected += [batch["image"].numpy().copy() for batch in loader.as_dicts()]
    for images, values in zip(held, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(images), values)


def check_a_mesh_gets_the_rows_in_order(shards: Path, folder: Path) -> None:
    """Four blocks of rows; two, each on two devices; one, on all four. Each can be used under jit."""
    import jax

    expected = plain_batches(shards, **EVEN)
    with open_loader(shards, **EVEN) as loader:
        for shape, split, num_blocks in (((4,), "data", 4), ((2, 2), "data", 2), ((2, 2), None, 1)):
            sharding = rows_over(*shape, split=split)
            batches = loader.as_jax(sharding=sharding, each_iter="same")
            for arrays, batch in zip(batches, expected, strict=True):
                assert_same(arrays, batch)
                rows = {shard.index[0].indices(BATCH_SIZE)[:2] for shard in arrays["label"].addressable_shards}
                assert len(rows) == num_blocks
                assert arrays["image"].sharding.is_equivalent_to(sharding, 4)
                mean = jax.jit(lambda images: images.mean())(arrays["image"])
                assert abs(float(mean) - float(batch["image"].mean())) < 1e-5


def check_what_a_mesh_cannot_take_is_refused(shards: Path, folder: Path) -> None:
    """Before any batch is read; a loader that is opened late says it when it is opened."""
    from jax.sharding import NamedSharding, PartitionSpec

    columns = NamedSharding(rows_over(4).mesh, PartitionSpec(None, "data"))
    for options, sharding, message in (
        ({}, rows_over(4), "last_batch_policy is 'PARTIAL'; open the loader with 'DROP', or with 'FILL'"),
        (EVEN | {"batch_size": 6}, rows_over(4), "batch_size=6 on each of 1 ranks makes 6 rows"),
        (EVEN | {"rank": 1, "world_size": 2}, rows_over(4), "open the loader with rank=0, world_size=1, not rank=1"),
        (EVEN, columns, "only the first axis"),
    ):
        with open_loader(shards, **options) as loader, pytest.raises(ValueError, match=message):
            loader.as_jax(sharding=sharding)
        assert loader.num_batches_left
    with open_loader(shards, rank="late") as loader:
        batches = loader.as_jax(sharding=rows_over(4))
        with pytest.raises(ValueError, match="last_batch_policy is 'PARTIAL'"):
            next(iter(batches))


def check_integers_keep_their_values(shards: Path, folder: Path) -> None:
    """64 bits that do not fit into 32 are an error, and the batch is not lost; with ``jax_enable_x64`` they fit."""
    import jax

    def graph(components: Any, random: Any) -> dict[str, Any]:
        thousand = types.Constant(1000, dtype=types.INT64)
        big = (components.label + 1) * thousand * thousand * thousand * thousand
        return dp.classification_eval(resize=16, crop=16, photo="jpg")(components, random) | {"big": big}

    with dp.loader(str(shards), graph, batch_size=4, seed=3, device="cpu") as loader:
        batches = loader.as_jax()
        with pytest.raises(ValueError, match="output 'big' has integers that need 64 bits"):
            next(iter(batches))
        assert next(iter(loader.as_jax(("label",))))[0].dtype == "int32"
        with jax.enable_x64(True):
            arrays = next(iter(loader.as_jax(each_iter="same")))
        assert arrays["big"].dtype == "int64"
        np.testing.assert_array_equal(np.asarray(arrays["big"]), (np.asarray(arrays["label"]) + 1) * 10**12)


def check_the_example_resumes(shards: Path, folder: Path) -> None:
    """Stopped in mid-epoch, past a checkpoint, and resumed: every step's loss, bit for bit."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    import jax_classification
    from run_files import STEPS, StepLog

    photos = write_shards(folder / "photos", make_samples([(40, 32)] * NUM_SAMPLES), per_shard=7)

    def train(run: str, *more: str) -> str:
        options = "--device cpu --batch-size 8 --crop 24 --width 8 --num-classes 6 --checkpoint-every 2 --epochs 3"
        where = ["--shards", str(photos), "--out", str(folder / run)]
        assert jax_classification.main([*where, *options.split(), *more]) == 0
        return (folder / run / STEPS).read_text()

    unbroken = train("unbroken")
    assert unbroken.count("\n") == 3 * (NUM_SAMPLES // 8)
    write = StepLog.write

    def stop(self: Any, *, step: int, **line: Any) -> None:
        if step == 5:
            raise KeyboardInterrupt
        write(self, step=step, **line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLog, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            train("broken")
    assert train("broken", "--resume") == unbroken


CHECKS: dict[str, Callable[[Path, Path], None]] = {
    name: check for name, check in list(globals().items()) if name.startswith("check_")
}


def run_checks(shards: Path, folder: Path, part: int) -> None:
    join_jax(0, num_devices=4)
    for check in [*CHECKS.values()][part::2]:
        check(shards, folder)


@pytest.mark.parametrize("part", [0, 1])
def test_one_process(shards: Path, tmp_path: Path, part: int) -> None:
    """Run half of the functions ``check_...`` in one process with four devices."""
    run_ranks(1, run_checks, shards, tmp_path, part)


def arrays_of_two(shards: Path, port: int) -> tuple[list[int], tuple[int, ...]]:
    """Return all labels and the image shape in one of two processes with two devices; assert a mesh is refused."""
    join_jax(port, num_devices=2)
    from jax.experimental import multihost_utils

    with open_loader(shards, **EVEN) as loader:
        batch = next(iter(loader.as_jax(sharding=rows_over(4))))
        labels = multihost_utils.process_allgather(batch["label"], tiled=True)
        with pytest.raises(ValueError, match="open the loader with rank=0, world_size=1"):
            loader.as_jax(sharding=rows_over(1, 4))  # one block of rows on all devices
    return labels.tolist(), batch["image"].shape


def test_two_processes(shards: Path) -> None:
    """Each array holds the rows of rank 0, then those of rank 1."""
    ranks = run_ranks(2, arrays_of_two, shards, free_port())
    expected = []
    for rank in range(2):
        expected += plain_batches(shards, rank=rank, world_size=2, **EVEN)[0]["label"].tolist()
    assert ranks == [(expected, (2 * BATCH_SIZE, 3, 16, 16))] * 2
