"""Accelerate: trains on the directory ``shards``; ``--resume`` continues from ``checkpoint``."""

import sys

import torch
from accelerate import Accelerator

import dali_pipes as dp

# First, because it starts the process group; cpu=True, because else processes without a GPU do not find each other.
accelerator = Accelerator(cpu=not torch.cuda.is_available())
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
model, optimizer = accelerator.prepare(model, optimizer)

with dp.loader("shards", dp.classification_train(crop=16), batch_size=4, seed=7) as loader:
    batches = loader.as_dataloader(("image", "label"))  # in the place of prepare(DataLoader(...))
    accelerator.register_for_checkpointing(batches)
    if "--resume" in sys.argv:
        accelerator.load_state("checkpoint")
    for epoch in range(loader.epoch, 3):
        for step, (image, label) in enumerate(batches):
            loss = torch.nn.functional.cross_entropy(model(image.to(accelerator.device)), label.to(accelerator.device))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank {accelerator.process_index}: epoch {epoch}, loss {loss.item().hex()}", flush=True)
            if epoch == 1 and step == 1:
                accelerator.save_state("checkpoint")
accelerator.end_training()
