"""Hugging Face's ``Trainer`` over loaders.

``Trainer`` names each epoch, and resumes by the number of its steps: `LoaderBatches` does not read what is skipped. The
subclass also refuses settings with which samples would be lost, repeated or counted twice.
"""

import math
from typing import TYPE_CHECKING, Any

from dali_pipes.integrations.data_loader import LoaderBatches, LoaderDataset
from dali_pipes.iterator import Loader
from dali_pipes.order.state import LoaderState, StateError

try:
    import transformers
    from transformers.trainer_callback import ExportableState, TrainerCallback
except ImportError as exc:
    raise ImportError("dali_pipes.transformers needs Hugging Face's: pip install transformers accelerate") from exc

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Hugging Face's ``Trainer``; ``train_dataset`` and ``eval_dataset`` may be what ``loader.as_dataloader()`` gave.

    It does not deal the batches of a loader out again: each process opens its own loader. All else, also what it does
    with other data sets, is as in the class of that name.

    ``train(resume_from_checkpoint=...)`` continues at the exact next batch, in mid-epoch, too. The number of processes,
    the batch size and ``gradient_accumulation_steps`` must be those of the checkpoint.

    Raises:
        TypeError: If ``train_dataset`` or ``eval_dataset`` is a loader or its ``as_dataset()``.
        ValueError: When training or evaluation begins: if the loader's batch size, number of processes or last-batch
            policy is not that of ``TrainingArguments``; or if the last batches of an evaluation differ in size between
            ranks.
        StateError: If a checkpoint is resumed with other shards, another seed, or another number of samples in a step.

    >>> names = {"pixel_values": "image", "labels": "label"}  # doctest: +SKIP
    >>> trainer = Trainer(  # doctest: +SKIP
    ...     model, arguments, train_dataset=train.as_dataloader(names), eval_dataset=val.as_dataloader(names)
    ... )
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.add_callback(_Position())

    # The loader's batches as they are.

    def get_train_dataloader(self) -> Any:
        if not _is_of_loader(batches := self.train_dataset):
            return super().get_train_dataloader()
        self._check(batches, "per_device_train_batch_size", self.args.train_batch_size)
        if self.args.dataloader_drop_last and not batches.drop_last:
            raise ValueError("dataloader_drop_last=True: open the train loader with last_batch_policy='DROP'")
        return batches

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        batches = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(batches, str):
            batches = self.eval_dataset[batches]
        return self._checked(batches) if _is_of_loader(batches) else super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._checked(test_dataset) if _is_of_loader(test_dataset) else super().get_test_dataloader(test_dataset)

    def _checked(self, batches: LoaderBatches) -> LoaderBatches:
        # Whether the results of all ranks can be gathered.
        self._check(batches, "per_device_eval_batch_size", self.args.eval_batch_size)
        batching = batches.delivery.parts.batching
        if batches.delivery.parts.inputs.grouping is not None:
            raise ValueError(
                "buckets give short batches, or repeated samples, in many places of an epoch, and Trainer expects them "
                "at its end: its results would be of other samples; open the evaluation's loader without "
                "Select(buckets=), or evaluate in a loop of your own, with Outputs(valid=True)"
            )
        num_last = batches.num_samples % batching.global_batch_size
        if batching.last_batch_policy == "PARTIAL" and num_last % batching.process.world_size:
            raise ValueError(
                f"the last {num_last} of {batches.num_samples} samples cannot be dealt evenly to "
                f"{batching.process.world_size} ranks, and Trainer gathers as many results from each; open the "
                "evaluation's loader with last_batch_policy='FILL': Trainer drops what FILL repeats"
            )
        return batches

    def _check(self, batches: LoaderBatches, name: str, batch_size: int) -> None:
        if batches.batch_size != batch_size:
            raise ValueError(
                f"{name} makes {batch_size} samples a batch, the loader gives {batches.batch_size}; pass the same to "
                "both"
            )
        process = batches.delivery.parts.batching.process
        # Processes that share batches, by tensor, context or sequence parallelism, are of one rank.
        num_shared = math.prod(getattr(self, f"get_{name}_size", lambda: 1)() for name in ("tp", "cp", "sp"))
        if process.world_size * num_shared != self.args.world_size:
            raise ValueError(
                f"the loader is of rank {process.rank} of {process.world_size}, and Trainer has {self.args.world_size} "
                f"processes, {num_shared} for each rank; make TrainingArguments before the loader, on CPUs with "
                "use_cpu=True; with a ParallelismConfig open the loader with rank='late', or with mesh="
            )


class _Position(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Keeps the train loader's position in each checkpoint, and compares it when the checkpoint is resumed.

    It is made without arguments: ``restore_callback_states_from_checkpoint`` makes a new one.
    """

    def __init__(self) -> None:
        self._batches: LoaderBatches | None = None  # of the current training

    def state(self) -> dict[str, Any]:
        """Return what ``Trainer`` writes into trainer_state.json."""
        position = None if self._batches is None else self._batches.state_dict()
        return {"args": {}, "attributes": {"position": position}}

    def on_train_begin(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Refuse to continue at another sample than the checkpoint's next one."""
        self._batches = batches = train_dataloader if isinstance(train_dataloader, LoaderBatches) else None
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("position")
        if batches is None or saved is None or not state.global_step:
            return
        position = LoaderState.from_dict(saved)
        inputs, batching = batches.delivery.parts.inputs, batches.delivery.parts.batching
        inputs.check(position)
        if args.ignore_data_skip:
            return
        saved_at = (position.order.epoch, position.delivered)
        plan = inputs.plan(position.order.epoch)
        if not plan.num_steps(batching, start=position.delivered):
            saved_at = (position.order.epoch + 1, 0)  # DROP leaves samples out
        num_steps = -(-len(batches) // args.gradient_accumulation_steps)
        epoch, step = divmod(state.global_step, num_steps)
        skipped = plan.position(step * args.gradient_accumulation_steps, batching)
        if (epoch, skipped) != saved_at:
            raise StateError(
                f"the checkpoint was written after {position.delivered} samples of epoch {position.order.epoch}, and "
                f"Trainer would continue after {skipped} samples of epoch {epoch}, because it counts steps; resume "
                "with the number of processes, the batch size and the gradient_accumulation_steps of the checkpoint"
            )


def _is_of_loader(data: Any) -> bool:
    """Whether these are the batches of a loader; the loader itself, and its data set, would not be left alone."""
    if isinstance(data, Loader | LoaderDataset):
        raise TypeError("a Trainer takes loader.as_dataloader(), not the loader itself and not loader.as_dataset()")
    return isinstance(data, LoaderBatches)


class HFCallback(TrainerCallback):  # type: ignore[misc]
    """Add the figures of a loader to what the trainer logs, as ``loader/samples`` and so on.

    ``dp.metrics.HFCallback(loader).add_to(trainer)``. The trainer's reporters (W&B, TensorBoard, MLflow) then report
    them with the loss. They are those of the rank that logs, rank 0. A face of a loader will do, too.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def add_to(self, trainer: Any) -> None:
        """Become the trainer's first callback: those given as ``callbacks=`` are called after the reporters."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Add the figures to ``logs``, and to the same entry of the trainer's history."""
        figures = {f"loader/{name}": figure for name, figure in self._loader.stats().items()}
        for entry in (logs, *state.log_history[-1:]):
            if entry is not None:
                entry.update(figures)
