"""Fabric: trains on the directory ``shards``, on 2 processes; ``--resume`` continues from ``checkpoint``."""

import sys

import torch
from lightning.fabric import Fabric

import dali_pipes as dp

fabric = Fabric(accelerator="auto", devices=2, strategy="ddp")
fabric.launch()  # first: the loader asks the process group for its rank
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 10))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

with dp.loader("shards", dp.classification_train(crop=16), batch_size=4, seed=7, device=fabric.device) as loader:
    batches = loader.as_dataloader(("image", "label"))  # and no fabric.setup_dataloaders()
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    if "--resume" in sys.argv:
        fabric.load("checkpoint", state)
    for epoch in range(loader.epoch, 3):
        for step, (image, label) in enumerate(batches):
            loss = torch.nn.functional.cross_entropy(model(image), label)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank {fabric.global_rank}: epoch {epoch}, loss {loss.item().hex()}", flush=True)
            if epoch == 1 and step == 1:
                fabric.save("checkpoint", state)
