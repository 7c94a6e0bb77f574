"""Train a small network to name the class of a photo: Flax and Optax, on all devices of JAX, fed by dali_pipes.

The Oxford-IIIT Pet data set, packed, shuffled and indexed as in segmentation.py; `pip install flax optax`.

    python examples/jax_classification.py --shards 'ais://pets/shuffled-{000002..000009}.tar' --out runs/breeds-jax

The devices of this process share each batch, so ``--batch-size`` must be a multiple of their number. Several processes,
started by Slurm's srun or Open MPI's mpirun, from which JAX takes their number, pass ``--distributed``.

A run with ``--resume`` sees the same photos as an unbroken run, and on the CPU has the same losses, bit for bit.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
import torch
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from options import make_parser
from run_files import StepLog, load_checkpoint, save_checkpoint

import dali_pipes as dp


class Classifier(nnx.Module):  # type: ignore[misc]  # no type information is published for Flax
    """Convolutions, each halving height and width, then the mean of what is left."""

    def __init__(self, *, num_classes: int, width: int, rngs: nnx.Rngs) -> None:
        widths = [3, width, 2 * width, 4 * width]
        self.layers = nnx.List(
            [
                nnx.Conv(before, after, kernel_size=(3, 3), strides=2, rngs=rngs)
                for before, after in itertools.pairwise(widths)
            ]
        )
        self.head = nnx.Linear(widths[-1], num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        for layer in self.layers:
            images = nnx.relu(layer(images))
        return self.head(images.mean(axis=(1, 2)))


@nnx.jit  # type: ignore[untyped-decorator]
def train_step(model: Classifier, optimizer: "nnx.Optimizer[Classifier]", images: jax.Array, labels: jax.Array) -> Any:
    """Train the model on one batch; returns the loss before the update, a float32 scalar."""

    def loss_of(model: Classifier) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def values_of(training: Any) -> list[torch.Tensor]:
    """Copy all arrays of model and optimizer, which every device has, in a fixed order."""
    return [torch.tensor(np.asarray(leaf)) for leaf in jax.tree.leaves(nnx.state(training))]


def set_values(training: Any, values: Sequence[torch.Tensor] | None, sharding: NamedSharding) -> None:
    """Put the saved arrays, or those that are there, on all devices."""
    leaves, tree = jax.tree.flatten(nnx.state(training))
    arrays = leaves if values is None else [value.numpy() for value in values]
    nnx.update(training, jax.tree.unflatten(tree, [jax.device_put(array, sharding) for array in arrays]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = make_parser("Name the class of a photo, with JAX.", batch_size=16, crop=128, width=16, lr=2e-3)
    parser.add_argument("--num-classes", type=int, default=38, help="labels are below it")
    parser.add_argument("--distributed", action="store_true", help="one of several processes: jax.distributed")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if arguments.distributed:
        jax.distributed.initialize()  # before the loader is opened, which takes its rank from there
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        saved = load_checkpoint(arguments.out, resume=arguments.resume)
    except FileExistsError as exc:
        parser.error(str(exc))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    model = Classifier(num_classes=arguments.num_classes, width=arguments.width, rngs=nnx.Rngs(arguments.seed))
    optimizer = nnx.Optimizer(model, optax.sgd(arguments.lr, momentum=0.9), wrt=nnx.Param)
    set_values((model, optimizer), saved["values"] if saved else None, NamedSharding(mesh, PartitionSpec()))
    with dp.loader(
        arguments.shards,
        dp.classification_train(crop=arguments.crop, layout="HWC"),
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        shuffle=dp.Shuffle(slices=arguments.num_slices),
        last_batch_policy="DROP",  # a mesh takes batches of one size
        device="cpu" if arguments.device == "cpu" else "auto",
        cache=dp.Cache(directory=arguments.cache_dir),
        state=saved["loader"] if saved else None,
    ) as loader:
        batches = loader.as_jax(("image", "label"), sharding=NamedSharding(mesh, PartitionSpec("data")))
        step = saved["step"] if saved else 0
        is_first = jax.process_index() == 0
        with StepLog(arguments.out, step=step, is_written=is_first) as log:
            while step < arguments.epochs * len(batches):
                for images, labels in batches:  # after a resume the rest of an epoch, which may be empty
                    loss = train_step(model, optimizer, images, labels)
                    log.write(step=step, epoch=loader.epoch, loss=float(loss))
                    step += 1
                    if is_first and (step % arguments.checkpoint_every == 0 or step == arguments.epochs * len(batches)):
                        values = values_of((model, optimizer))
                        save_checkpoint(arguments.out, {"values": values, "loader": batches.state_dict(), "step": step})
    return 0


if __name__ == "__main__":
    sys.exit(main())
