"""A rank that serves its figures, in a process of its own: reads all batches of an epoch, then waits to be told."""

import sys

import dali_pipes as dp
from tests.dali_pipes.raw import raw

if __name__ == "__main__":
    shards, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    loader = dp.loader(shards, raw, batch_size=4, device="cpu", rank=rank, world_size=2)
    loader.name = "train"
    served = dp.metrics.serve(port, labels={"run": "of-this-test"})
    num_samples = sum(len(batch["label"]) for (batch,) in loader)
    print(num_samples, served.has_port, flush=True)
    sys.stdin.read()
