"""A callback that adds a loader's figures to the logs of Hugging Face's ``Trainer``."""

from typing import Any

from transformers import TrainerCallback

from dali_pipes.metrics.figures import HasStats, logged_figures


class HFCallback(TrainerCallback):  # type: ignore[misc]
    """Add the figures of a loader to what the trainer logs, as ``loader/samples`` and so on.

    ``dp.metrics.HFCallback(loader).add_to(trainer)``. The trainer's reporters (W&B, TensorBoard, MLflow) then report
    them with the loss. They are those of the rank that logs, rank 0.
    """

    def __init__(self, loader: HasStats) -> None:
        self._loader = loader

    def add_to(self, trainer: Any) -> None:
        """Become the trainer's first callback: those given as ``callbacks=`` are called after the reporters."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Add the figures to ``logs``, and to the same entry of the trainer's history."""
        figures = logged_figures(self._loader)
        for entry in (logs, *state.log_history[-1:]):
            if entry is not None:
                entry.update(figures)
