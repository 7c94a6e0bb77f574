"""A data module for Lightning's trainer, made of the arguments of `dali_pipes.loader`.

Lightning numbers the epochs and keeps the position: its fit loop puts the train loader's state into each checkpoint,
and loads it before the first batch, but only into an open loader, which has begun to stage epoch 0 by then. So the data
module keeps the same state. The trainer restores it before it asks for the loader, which is then opened there.

# Note [whose epoch]: the fit loop asks for its first iterator before it knows that the epoch of a checkpoint was over.
Therefore the epoch is looked up when its first batch is needed, not when the iterator is made.
"""

import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule, Trainer

    from dali_pipes.iterator import Loader


def _find_package() -> Any:
    """Import the package whose trainer the program uses: each trainer takes only its own modules and callbacks."""
    names = ("lightning.pytorch", "pytorch_lightning")
    imported = [name for name in names if name in sys.modules]
    installed = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is not None]
    if not installed:
        raise ImportError("dali_pipes.lightning needs Lightning; install: pip install 'dali-pipes[lightning]'")
    return importlib.import_module((imported or installed)[0])


if not TYPE_CHECKING:
    _package = _find_package()
    Callback, LightningDataModule = _package.Callback, _package.LightningDataModule


class DataModule(LightningDataModule):
    """Train, validation, test and predict loaders of one trainer, which gives each its rank.

    Under `ModelParallelStrategy` that is the rank along the mesh's data-parallel dimension: the processes of one
    tensor-parallel group get the same batches.

    Batches are plain dicts, ``{"image": ..., "label": ...}``. ``trainer.fit(model, datamodule, ckpt_path=...)``
    continues at the exact next batch, also if the checkpoint was taken in mid-epoch, and with another batch size or
    number of processes. The train loader's epoch is the trainer's, and starts anew after ``limit_train_batches``. The
    other loaders give epoch 0 each time, so that every validation sees the same batches.

    Args:
        train: Arguments of `dali_pipes.loader` by name, with ``"shards"`` and ``"graph"``.
        val: Likewise, but not shuffled unless ``"shuffle"`` is given; this also holds for the next two.
        test: Likewise.
        predict: Likewise.
        **options: Arguments for all of them: ``batch_size``, ``seed``, ``cache=dp.Cache(...)``, ... Arguments in
            ``train`` and the like take precedence. The device is the trainer's unless ``device`` is given.

    Raises:
        TypeError: If `dali_pipes.loader` has no such argument, or a required one is missing.
        ValueError: If an argument must come from the trainer, or no loader is described.

    >>> data = DataModule(  # doctest: +SKIP
    ...     train={"shards": "ais://imagenet/train-", "graph": dp.classification_train()},
    ...     val={"shards": "ais://imagenet/val-", "graph": dp.classification_eval()},
    ...     batch_size=256,
    ...     seed=7,
    ... )
    """

    def __init__(
        self,
        *,
        train: Mapping[str, Any] | None = None,
        val: Mapping[str, Any] | None = None,
        test: Mapping[str, Any] | None = None,
        predict: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from dali_pipes.iterator import loader

        super().__init__()
        described = {"train": train, "val": val, "test": test, "predict": predict}
        if not any(described.values()):
            raise ValueError("a DataModule needs one of train, val, test, predict: the arguments of a loader as a dict")
        self._arguments: dict[str, dict[str, Any]] = {}
        for stage, arguments in described.items():
            if arguments is not None:
                defaults = {} if stage == "train" else {"shuffle": False}
                self._arguments[stage] = defaults | options | dict(arguments)
                if given := self._arguments[stage].keys() & {"rank", "world_size", "mesh", "state"}:
                    raise ValueError(f"{stage}: the trainer gives '{min(given)}'; leave it out")
                try:
                    inspect.signature(loader).bind(**self._arguments[stage])
                except TypeError as exc:
                    raise TypeError(f"{stage}: not the arguments of dali_pipes.loader: {exc}") from None
            else:
                # The trainer takes an overridden hook as a sign that there is such a loader.
                name = f"{stage}_dataloader"
                setattr(self, name, getattr(super(), name))
        self._batches: dict[str, _Batches] = {}
        self._train_state: Mapping[str, Any] | None = None  # of a checkpoint
        self._last_train_state: dict[str, Any] | None = None

    @property
    def loaders(self) -> dict[str, "Loader"]:
        """The open loaders by stage: for ``num_valid``, ``data_wait_s`` and the like."""
        return {stage: batches.loader for stage, batches in self._batches.items()}

    # The trainer's hooks; those that open loaders are below.

    def state_dict(self) -> dict[str, Any]:
        """Return the train loader's state, or its last one. Called for each checkpoint, also after ``fit``."""
        batches = self._batches.get("train")
        state = self._last_train_state if batches is None else batches.state_dict()
        return {} if state is None else {"train": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state for the train loader. Called when a checkpoint is restored, before any loader is asked for."""
        self._train_state = state_dict.get("train")

    def teardown(self, stage: str) -> None:
        """Close the loaders. The trainer calls it when ``fit``, ``validate``, ``test`` or ``predict`` is over."""
        self._train_state = None  # it may be of a checkpoint that was tested; the next fit is another run
        opened, self._batches = self._batches, {}
        if "train" in opened:
            self._last_train_state = opened["train"].state_dict()
        for batches in opened.values():
            batches.loader.close()

    def on_exception(self, exception: BaseException) -> None:
        """Close the loaders: after an exception the trainer does not call ``teardown``."""
        self.teardown("")

    def _open(self, stage: str) -> "_Batches":
        """Open the stage's loader; with ``reload_dataloaders_every_n_epochs`` the trainer asks for it again."""
        from dali_pipes.iterator import loader

        if stage not in self._batches:
            trainer = self.trainer
            if trainer is None:
                raise ValueError(
                    f"the {stage} loader needs a trainer, which knows its rank; pass the data module to a trainer as "
                    "datamodule="
                )
            root = trainer.strategy.root_device
            found: dict[str, Any] = {
                # With devices=[2, 3] the CUDA device is not the process's number.
                "device": ("cuda" if root.index is None else f"cuda:{root.index}") if root.type == "cuda" else "cpu",
            }
            mesh: Any = getattr(trainer.strategy, "device_mesh", None)
            if "data_parallel" in (getattr(mesh, "mesh_dim_names", None) or ()):
                found["mesh"] = mesh["data_parallel"]  # under tensor parallelism several processes are of one rank
            else:
                # What Lightning tells a sampler of torch's.
                sampled = getattr(trainer.strategy, "distributed_sampler_kwargs", {})
                found |= {
                    "rank": sampled.get("rank", trainer.global_rank),
                    "world_size": sampled.get("num_replicas", trainer.world_size),
                }
            if stage == "train":
                found["state"] = self._train_state
            opened = loader(**(found | self._arguments[stage]))
            opened.name = stage  # in metrics
            self._batches[stage] = (_TrainBatches if stage == "train" else _Batches)(opened, trainer)
        return self._batches[stage]

    train_dataloader = functools.partialmethod(_open, "train")
    val_dataloader = functools.partialmethod(_open, "val")
    test_dataloader = functools.partialmethod(_open, "test")
    predict_dataloader = functools.partialmethod(_open, "predict")


class _Batches:
    """A loader that gives the trainer the same batches each time.

    It is not the face itself: a trainer with ``overfit_batches`` replaces what has a sampler.
    """

    def __init__(self, loader: "Loader", trainer: "Trainer") -> None:
        self.loader, self._trainer = loader, trainer
        self._face = loader.as_dataloader()

    def __len__(self) -> int:
        return len(self._face)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A generator: Note [whose epoch].
        self._face.set_epoch(self._epoch())
        yield from self._face

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state. Called for each checkpoint."""
        return self.loader.state_dict()

    def _epoch(self) -> int:
        return 0


class _TrainBatches(_Batches):
    """The train loader: it follows the trainer's epoch, and starts at the position in a checkpoint."""

    def _epoch(self) -> int:
        # Overfitting means to see the same few batches again.
        return 0 if getattr(self._trainer, "overfit_batches", 0) > 0 else int(self._trainer.current_epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken. Called when a checkpoint is restored, before the first batch.

        Raises:
            StateError: If the state is of other shards or another order.
        """
        self._face.load_state_dict(state)
        # The fit loop counts batches, and ends the epoch when its count is `len(self)`. After a change of batch size or
        # world size the samples that were seen are another number of batches, so the count is corrected.
        counted = self._trainer.fit_loop.epoch_loop.batch_progress.current
        num_more = len(self) - self.loader.num_batches_left - counted.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(counted, name, getattr(counted, name) + num_more)


class LightningCallback(Callback):
    """Log the train loader's figures as ``loader/samples`` and so on, whenever the trainer logs a step.

    ``Trainer(callbacks=[dp.metrics.LightningCallback()])``. Each rank reads its own loader; the usual loggers write
    rank 0's figures.

    Args:
        loader: A loader or a face of one; ``None``: the train loader of the trainer's `DataModule`.
    """

    def __init__(self, loader: Any = None) -> None:
        self._loader = loader
        self._logged_step = 0

    def on_train_batch_end(self, trainer: "Trainer", *_: Any) -> None:
        """Log the figures after each ``log_every_n_steps`` steps."""
        every = getattr(trainer, "log_every_n_steps", 1)
        # Of the batches whose gradients are accumulated only the last one makes a step.
        if not every or trainer.global_step % every or trainer.global_step == self._logged_step:
            return
        self._logged_step = trainer.global_step
        loader = self._loader
        if loader is None:
            loader = getattr(getattr(trainer, "datamodule", None), "loaders", {}).get("train")
        if loader is None:
            raise TypeError(
                "LightningCallback() finds the train loader of dali_pipes.lightning.DataModule only; pass the loader: "
                "LightningCallback(loader)"
            )
        figures = {f"loader/{name}": figure for name, figure in loader.stats().items()}
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)
