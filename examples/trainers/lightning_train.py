"""Lightning with loaders of its own: trains on the directory ``shards``, on 2 processes."""

import lightning.pytorch as pl
import torch

import dali_pipes as dp


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3 * 32 * 32, 6)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


if __name__ == "__main__":
    options = {"batch_size": 4, "rank": "late", "device": "cpu"}
    train = dp.loader("shards", dp.classification_train(crop=32), seed=7, **options)
    val = dp.loader("shards", dp.classification_eval(resize=32, crop=32), shuffle=False, **options)
    with train, val:
        trainer = pl.Trainer(max_epochs=2, devices=2, strategy="ddp", accelerator="cpu", logger=False)
        outputs = ("image", "label")
        trainer.fit(Model(), train.as_dataloader(outputs), val.as_dataloader(outputs, each_iter="same"))
        trainer.save_checkpoint("last.ckpt")  # fit(..., ckpt_path="last.ckpt") with more epochs continues
