"""Composer: trains on the directory ``shards``; a checkpoint's path as argument continues from it."""

import sys

import torch
from composer import ComposerModel, Trainer

import dali_pipes as dp
from dali_pipes.integrations.composer import ResumeLoader


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3 * 32 * 32, 6)

    def forward(self, batch):
        return self.layer(batch["image"].flatten(1))

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs, batch["label"])


if __name__ == "__main__":
    options = {"batch_size": 4, "rank": "late", "device": "cpu"}
    train = dp.loader("shards", dp.classification_train(crop=32), seed=7, **options)
    val = dp.loader("shards", dp.classification_eval(resize=32, crop=32), shuffle=False, **options)
    with train, val:
        model, batches = Model(), train.as_dataloader()
        trainer = Trainer(
            model=model,
            train_dataloader=batches,
            eval_dataloader=val.as_dataloader(each_iter="same"),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            max_duration="3ep",
            device="cpu",
            device_train_microbatch_size=2,
            callbacks=[ResumeLoader(batches)],
            save_folder="checkpoints",
            save_interval="1ba",
            save_num_checkpoints_to_keep=-1,
            save_overwrite=True,
            load_path=sys.argv[1] if len(sys.argv) > 1 else None,  # checkpoints/ep0-ba5-rank0.pt
        )
        trainer.fit()
