"""JAX: trains on the directory ``shards``, on all devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dali_pipes as dp

rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


@jax.jit
def step(weights, images, labels):
    def loss_of(weights):
        scores = jax.nn.log_softmax(images.reshape(len(images), -1) @ weights)
        return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.01 * gradient, loss


weights = jnp.zeros((32 * 32 * 3, 10))
graph = dp.classification_train(crop=32, layout="HWC")
with dp.loader("shards", graph, batch_size=8, seed=3, last_batch_policy="DROP") as loader:
    batches = loader.as_jax(("image", "label"), sharding=rows)
    for epoch in range(2):
        for images, labels in batches:
            weights, loss = step(weights, images, labels)
        print(f"epoch {epoch}: loss {loss:.4f}")
