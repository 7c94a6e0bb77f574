"""MosaicML Composer's trainer, which wants an older torch: see `make integrations-composer`."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.trainers.ranks import launch, write_program
from tests.trainers.test_resume import Run, assert_resumes
from tests.trainers.tiny import NUM_EPOCHS, Step, TinyModel, open_loader, step_of, tiny_optimizer

pytest.importorskip("composer", reason="composer is not installed; make integrations-composer")
from composer import Callback, ComposerModel, Trainer

from dali_pipes.integrations.composer import ResumeLoader


class Model(ComposerModel):
    """With dropout: the random state is restored, too. Keeps a `Step` of each microbatch, and the validated keys."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny, self.dropout = TinyModel(), nn.Dropout(0.2)
        self.steps: list[Step] = []
        self.validated: list[list[str]] = []

    def forward(self, batch: dict[str, Any]) -> Tensor:
        loss, _ = self.tiny(self.dropout(batch["image"]), batch["label"])
        return loss

    def loss(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        self.steps.append(step_of(batch["key"], outputs))
        return outputs

    def eval_forward(self, batch: dict[str, Any], outputs: Any = None) -> Tensor:
        self.validated[-1] += batch["key"]
        return self.forward(batch)

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None: ...


class Validations(Callback):
    def __init__(self, model: Model) -> None:
        self._model = model

    def eval_start(self, state: Any, logger: Any) -> None:
        self._model.validated.append([])


def fit(shards: Path, folder: Path, resume: int, *, skips: bool = False) -> Run:
    """Train three epochs, or from step ``resume`` on, two microbatches a batch; if ``skips``, Composer skips."""
    from composer.utils import dist

    rank = {"rank": dist.get_global_rank(), "world_size": dist.get_world_size()}
    model = Model()
    with open_loader(shards, **rank) as train, open_loader(shards, train=False, shuffle=False, **rank) as val:
        batches = train.as_dataloader()
        path = folder / f"ep{(resume - 1) // len(batches)}-ba{resume}-rank0.pt"
        trainer = Trainer(
            model=model,
            train_dataloader=batches,
            eval_dataloader=val.as_dataloader(each_iter="same"),
            optimizers=tiny_optimizer(model),
            max_duration=f"{NUM_EPOCHS}ep",
            device="cpu",
            device_train_microbatch_size=2,
            callbacks=[Validations(model)] if skips else [Validations(model), ResumeLoader(batches)],
            save_folder=None if resume else str(folder),
            save_interval="1ba",
            save_num_checkpoints_to_keep=-1,
            load_path=str(path) if resume else None,
            seed=0,
            progress_bar=False,
        )
        trainer.fit()
        trainer.close()
    pairs = zip(model.steps[::2], model.steps[1::2], strict=True)
    return Run([Step(one.keys + other.keys, f"{one.loss} {other.loss}") for one, other in pairs], model.validated)


@pytest.mark.parametrize(("world_size", "skips"), [(1, False), (2, False), (1, True)])
def test_resumed_trainer_has_the_unbroken_losses(shards: Path, tmp_path: Path, world_size: int, skips: bool) -> None:
    assert_resumes("composer", partial(fit, skips=skips), shards, tmp_path, world_size=world_size, validates=True)


def test_program_runs(shards: Path, tmp_path: Path) -> None:
    program = write_program("composer_train.py", shards, tmp_path)
    launch(program, folder=tmp_path)
    launch(program, "checkpoints/ep0-ba5-rank0.pt", folder=tmp_path)
    assert (tmp_path / "checkpoints" / "ep2-ba24-rank0.pt").exists()
