"""Transformers' `Trainer`: trains on the directory ``shards``; ``--resume`` continues from ``runs``."""

import sys

import torch
from transformers import ResNetConfig, ResNetForImageClassification, TrainingArguments

import dali_pipes as dp
from dali_pipes.transformers import Trainer  # in the place of transformers.Trainer

arguments = TrainingArguments(  # first: it starts the process group
    output_dir="runs",
    use_cpu=not torch.cuda.is_available(),  # else processes without a GPU do not find each other
    per_device_train_batch_size=4,  # the loaders' batch_size
    per_device_eval_batch_size=4,
    num_train_epochs=2,
    eval_strategy="epoch",
    save_steps=2,
    report_to="none",
)
names = {"pixel_values": "image", "labels": "label"}  # the model's arguments: the loader's outputs
train_graph = dp.classification_train(crop=32)
eval_graph = dp.classification_eval(resize=32, crop=32)
model = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=10))

with (
    dp.loader("shards", train_graph, batch_size=4, seed=7) as train,
    dp.loader("shards", eval_graph, batch_size=4, shuffle=False, last_batch_policy="FILL") as val,
):
    trainer = Trainer(
        model,
        arguments,
        train_dataset=train.as_dataloader(names),
        eval_dataset=val.as_dataloader(names, each_iter="same"),
    )
    trainer.train(resume_from_checkpoint="--resume" in sys.argv)
