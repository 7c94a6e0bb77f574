"""Ignite: trains on the directory ``shards``; a checkpoint's path as argument continues from it."""

import sys

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver

import dali_pipes as dp

model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train_step(engine, batch):
    images, labels = batch
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


with dp.loader("shards", dp.classification_train(crop=32), batch_size=4, seed=7) as loader:
    data, trainer = loader.as_dataloader(("image", "label")), Engine(train_step)
    kept = {"model": model, "optimizer": optimizer, "trainer": trainer, "data": data}
    saver = Checkpoint(kept, DiskSaver("checkpoints", require_empty=False), n_saved=None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=5), saver)
    if len(sys.argv) > 1:  # checkpoints/checkpoint_10.pt
        Checkpoint.load_objects(kept, sys.argv[1])
    state = trainer.run(data, max_epochs=3)
    print(state.iteration, state.output)
