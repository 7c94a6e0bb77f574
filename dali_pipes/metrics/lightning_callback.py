"""A callback that gives a loader's figures to the loggers of Lightning's trainer."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from dali_pipes.metrics.figures import HasStats, logged_figures

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
else:
    # Each trainer takes callbacks of its own package only.
    _is_old = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    Callback = importlib.import_module("pytorch_lightning" if _is_old else "lightning.pytorch").Callback


class LightningCallback(Callback):
    """Log the train loader's figures as ``loader/samples`` and so on, whenever the trainer logs a step.

    ``Trainer(callbacks=[dp.metrics.LightningCallback()])``. Each rank reads its own loader; the usual loggers write
    rank 0's figures.

    Args:
        loader: ``None``: the train loader of the trainer's data module, a `dali_pipes.lightning.DataModule`.
    """

    def __init__(self, loader: HasStats | None = None) -> None:
        self._loader = loader
        self._logged_step = 0

    def on_train_batch_end(self, trainer: "Trainer", *_: Any) -> None:
        """Log the figures after each ``log_every_n_steps`` steps."""
        every = getattr(trainer, "log_every_n_steps", 1)
        # Of the batches whose gradients are accumulated only the last one makes a step.
        if not every or trainer.global_step % every or trainer.global_step == self._logged_step:
            return
        self._logged_step = trainer.global_step
        loader: HasStats | None = self._loader
        if loader is None:
            loader = getattr(getattr(trainer, "datamodule", None), "loaders", {}).get("train")
        if loader is None:
            raise TypeError(
                "LightningCallback() finds the train loader of dali_pipes.lightning.DataModule only; pass the loader: "
                "LightningCallback(loader)"
            )
        figures = logged_figures(loader)
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)
