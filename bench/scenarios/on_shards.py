"""What scenarios that open our loader on shards share."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from bench.engine.options import at_least, option
from bench.engine.scenario import Made, Row, Scenario, Subject
from bench.loaders.protocol import Device
from bench.tools.environment import available_cores
from bench.tools.folders import RunFolder
from bench.tools.repeat import repeat_shards, upload_shards
from prep.index import index_shards

if TYPE_CHECKING:
    from dali_pipes import Loader
    from dali_pipes.formats.manifest import Manifest
    from dali_pipes.store.shard_set import ShardSet


@dataclass(frozen=True, kw_only=True)
class ShardsScenario(Scenario[Made, Subject, Row]):
    """A benchmark of loaders on the shards that the command opens."""

    shards: "ShardSet | None" = option(required=True)
    repeats: int = option(5)
    batch_size: int = option(64, help="Samples a batch.")
    num_threads: int = option(
        factory=available_cores, type=at_least(1), help="DALI's threads, or worker processes.  [default: cores]"
    )
    device: Device = option("auto", type=click.Choice(get_args(Device)))
    crop: int = option(350, help="Side of the crop.")

    def open_loader(
        self,
        urls: Sequence[str],
        endpoint: str | None,
        *,
        cache_dir: Path,
        cache_bytes: int | None = None,
        state: dict[str, Any] | None = None,
        **shuffle: Any,
    ) -> "Loader":
        """Open our loader on some shards, with the graph that fits them; its batches have keys."""
        import dali_pipes as dp
        from dali_pipes.commands.tune import ChosenGraph

        return dp.loader(
            list(urls),
            ChosenGraph(crop=self.crop),
            batch_size=self.batch_size,
            seed=self.seed,
            device=self.device,
            shuffle=dp.Shuffle(**shuffle),
            cache=dp.Cache(directory=cache_dir, max_bytes=cache_bytes, show_progress=False),
            decode=dp.Decode(threads=self.num_threads),
            outputs=dp.Outputs(keys=True),
            state=state,
            endpoint=endpoint,
        )


def upload_repeated(
    shards: "ShardSet",
    endpoint: str,
    bucket: str,
    *,
    folder: RunFolder,
    num_shards: int,
    num_samples: int | None = None,
) -> "Manifest":
    """Repeat samples in new shards, upload them to a new bucket, and index them there."""
    copies = folder.new()
    packed = repeat_shards(shards, directory=copies, num_samples=num_samples, num_shards=num_shards, option="--cache")
    uploaded = upload_shards(packed, endpoint, bucket)
    shutil.rmtree(copies)
    return index_shards(uploaded, show_progress=True)


def touch(batch: dict[str, Any]) -> None:
    """Read one value of each photo, which waits until the batch is there."""
    batch["image"][:, 0, 0, 0].sum().item()
