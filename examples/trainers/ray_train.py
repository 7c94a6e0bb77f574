"""Ray Train: trains on the directory ``shards``, on 2 workers; a second start continues from ``runs``."""

import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model

import dali_pipes as dp


def train(config):
    model = prepare_model(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with dp.loader(config["shards"], dp.classification_train(crop=16), batch_size=4, seed=7) as loader:
        batches = loader.as_dataloader(("image", "label"))  # and no prepare_data_loader()
        kept = {"model": getattr(model, "module", model), "optimizer": optimizer, "batches": batches}
        checkpoint = ray.train.get_checkpoint()
        if checkpoint:
            with checkpoint.as_directory() as folder:
                saved = torch.load(Path(folder, "state.pt"))
            for name, part in kept.items():
                part.load_state_dict(saved[name])
        for epoch in range(loader.epoch, 3):
            for image, label in batches:
                loss = torch.nn.functional.cross_entropy(model(image), label)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with tempfile.TemporaryDirectory() as folder:
                    torch.save({name: part.state_dict() for name, part in kept.items()}, Path(folder, "state.pt"))
                    report = {"epoch": epoch, "loss": loss.item().hex()}
                    ray.train.report(report, checkpoint=ray.train.Checkpoint.from_directory(folder))


if __name__ == "__main__":
    run = ray.train.RunConfig(name="pets", storage_path=str(Path("runs").resolve()))
    scaling = ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
    shards = {"shards": str(Path("shards").resolve())}
    result = TorchTrainer(train, train_loop_config=shards, run_config=run, scaling_config=scaling).fit()
    print(result.metrics)
