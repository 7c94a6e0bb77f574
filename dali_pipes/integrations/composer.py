"""A callback with which MosaicML Composer's trainer resumes a loader instead of skipping batches.

Without it Composer is exact, too, if its ``spin_dataloaders`` stays on: after a resume it takes one batch of each epoch
that is over, and those of this epoch that were trained on, and drops them.
"""

from typing import Any

from composer import Callback, Logger, State
from composer.utils import reproducibility

from dali_pipes.integrations.data_loader import LoaderBatches


class ResumeLoader(Callback):  # type: ignore[misc]
    """Keeps the position of a train loader in Composer's checkpoints, and names the epochs to it.

    Args:
        train_dataloader: What ``loader.as_dataloader()`` gave, and the trainer gets as ``train_dataloader``.

    >>> trainer = Trainer(  # doctest: +SKIP
    ...     model=model, train_dataloader=batches, callbacks=[ResumeLoader(batches)], load_path="ep1-ba9-rank0.pt"
    ... )
    """

    def __init__(self, train_dataloader: LoaderBatches) -> None:
        self._batches = train_dataloader
        self._random_state: list[dict[str, Any]] | None = None  # of a checkpoint, until the first batch
        self._is_placed = False  # whether the loader stands where the trainer does

    def state_dict(self) -> dict[str, Any]:
        """Return position and random state. Called for each checkpoint, on all ranks."""
        return {"loader": self._batches.state_dict(), "random_state": reproducibility.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the loader to the position of a checkpoint."""
        self._batches.load_state_dict(state["loader"])
        self._random_state = state["random_state"]
        self._is_placed = True

    def fit_start(self, state: State, logger: Logger) -> None:
        """Continue where a checkpoint or an earlier ``fit`` ended; the trainer then skips no batches.

        The trainer's epoch may be the one after the loader's. If a checkpoint has no state of this callback, the
        trainer skips.
        """
        if self._is_placed:
            self._batches.load_state_dict(self._batches.state_dict())
            self._batches.set_epoch(int(state.timestamp.epoch))
            state.dataset_resumption["train"] = True
        self._is_placed = True

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Restore the random state: in mid-epoch the trainer does so only when it has skipped batches."""
        if self._random_state is not None:
            reproducibility.load_rng_state(self._random_state)
            self._random_state = None
