"""JAX: arrays on one device and over a mesh, of one process and of two."""

import gc
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali import types

import dali_pipes as dp
from tests.docs.pages import REPOSITORY
from tests.shards import make_samples, write_shards
from tests.trainers.packages import need
from tests.trainers.ranks import kept_port, launch_from_page, run_ranks
from tests.trainers.tiny import ALL_KEYS, BATCH_SIZE, NUM_SAMPLES, open_loader

need("jax", "flax", "optax")

NUM_EPOCHS = 3
EVEN: dict[str, Any] = {"last_batch_policy": "FILL", "outputs": dp.Outputs(keys=True, valid=True)}


def use_devices(number: int) -> None:
    """Have JAX see so many devices on the CPU; before its first use in this process."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={number}"


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
            tensors: list[Any] = []

            def keep(batch: dict[str, Any], form: Any = form, tensors: list[Any] = tensors) -> dict[str, Any]:
                tensors.append(batch["image"].data_ptr())
                arrays: dict[str, Any] = form(batch)
                return arrays

            arrays = loader.delivery.next_batch(keep)
            assert arrays["image"].unsafe_buffer_pointer() == tensors[0]


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
    with open_loader(shards) as loader, pytest.raises(TypeError, match="sharding must be a"):
        loader.as_jax(sharding="data")  # type: ignore[arg-type]  # as a program without types may pass it
    with open_loader(shards) as loader, pytest.raises(ValueError, match="outputs must name what the loader gives"):
        loader.as_jax(("image", "mask"))
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
        assert (
            jax_classification.main(["--shards", str(photos), "--out", str(folder / run), *options.split(), *more]) == 0
        )
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
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def run_checks(shards: Path, folder: Path) -> dict[str, str]:
    """What went wrong in each check, in one process with four devices."""
    import traceback

    use_devices(4)
    errors = {}
    for name, check in CHECKS.items():
        try:
            check(shards, folder)
        except Exception:  # noqa: BLE001 (the test of this check fails with it)
            errors[name] = traceback.format_exc()
    return errors


@pytest.fixture(scope="module")
def errors(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found: dict[str, str] = run_ranks(1, run_checks, shards, tmp_path_factory.mktemp("jax"))[0]
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_one_process(errors: dict[str, str], check: str) -> None:
    """See the function ``check_...``."""
    assert check not in errors, errors[check]


def test_program_of_the_page(shards: Path, tmp_path: Path) -> None:
    """It trains two epochs on what JAX finds here."""
    printed = launch_from_page("train_jax.py", shards, tmp_path)
    assert re.findall(r"epoch (\d): loss \d+\.\d{4}\n", printed) == ["0", "1"]


def train_of_two(shards: Path, port: int) -> dict[str, Any]:
    """One of two processes of two devices each: an unbroken training, a broken and resumed one, and what is refused."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]  # JAX alone says which process this is
    use_devices(2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    sharding = rows_over(4)

    @jax.jit
    def step(training: Any, images: Any, labels: Any, valid: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            logits = images.reshape(len(images), -1) @ weights
            losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
            return (losses * valid).sum() / valid.sum()

        weights, momentum = training
        loss, gradient = jax.value_and_grad(loss_of)(weights)
        momentum = 0.9 * momentum + gradient
        return (weights - 0.1 * momentum, momentum), loss

    def train(training: Any, steps: list[Any], state: Any = None, stop: int = 0) -> tuple[Any, Any]:
        with open_loader(shards, state=state, **EVEN) as loader:
            batches = loader.as_jax(sharding=sharding)
            while len(steps) < NUM_EPOCHS * len(batches):
                for batch in batches:
                    keys = [key for key, is_valid in zip(batch["key"], local(batch["valid"]), strict=True) if is_valid]
                    training, loss = step(training, batch["image"], batch["label"], batch["valid"])
                    steps.append((loader.epoch, keys, float(loss).hex()))
                    if len(steps) == stop:
                        return training, batches.state_dict()
        return training, None

    def local(array: Any) -> Any:
        return np.concatenate([np.asarray(shard.data) for shard in array.addressable_shards])

    start = (jnp.zeros((3 * 16 * 16, 6)), jnp.zeros((3 * 16 * 16, 6)))
    runs: dict[int, list[Any]] = {0: []}
    train(start, runs[0])
    for stop in (2, 4):  # in mid-epoch, and after an epoch's last batch
        runs[stop] = []
        training, state = train(start, runs[stop], stop=stop)
        train(training, runs[stop], state)
    with open_loader(shards, **EVEN) as loader:
        batch = next(iter(loader.as_jax(sharding=sharding)))
        rows = multihost_utils.process_allgather(batch["label"], tiled=True)
        refused = ""
        try:
            loader.as_jax(sharding=rows_over(1, 4))  # one block of rows on all devices
        except ValueError as exc:
            refused = str(exc)
    return {"runs": runs, "labels": rows.tolist(), "shape": batch["image"].shape, "refused": refused}


def test_two_processes(shards: Path) -> None:
    """Rank r has its block of rows of each array; each sample once an epoch; resumed, the losses are the same."""
    with kept_port() as port:
        ranks = run_ranks(2, train_of_two, shards, port)
    num_steps = -(-NUM_SAMPLES // (2 * BATCH_SIZE))
    for result in ranks:
        unbroken = result["runs"][0]
        assert result["runs"] == dict.fromkeys(result["runs"], unbroken)
        assert len(unbroken) == NUM_EPOCHS * num_steps
        assert len({loss for _, _, loss in unbroken}) == len(unbroken)
        assert result["shape"] == (2 * BATCH_SIZE, 3, 16, 16)
    for epoch in range(NUM_EPOCHS):
        steps = [step for result in ranks for step in result["runs"][0]]
        assert sorted(key for number, keys, _ in steps if number == epoch for key in keys) == ALL_KEYS
    expected = [
        label
        for rank in range(2)
        for label in plain_batches(shards, rank=rank, world_size=2, **EVEN)[0]["label"].tolist()
    ]
    assert [result["labels"] for result in ranks] == [expected, expected]
    assert "open the loader with rank=0, world_size=1" in ranks[0]["refused"]
    assert "open the loader with rank=0, world_size=1" in ranks[1]["refused"]
