"""The loader that ``profile`` and ``tune`` run: its shards and graph are named on the command line."""

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, join_options, size
from dali_pipes.commands.output import print_note
from dali_pipes.store.patience import current_patience

if TYPE_CHECKING:
    from dali_pipes.graph.definition import Graph
    from dali_pipes.graph.inputs import Components
    from dali_pipes.graph.random import Random
    from dali_pipes.iterator import Loader
    from dali_pipes.options import Cache


GRAPHS = ("segmentation", "classification_train", "classification_eval")

# The argument URL and the options that make a `Job`; a command takes them as ``**options``.
job_options = join_options(
    click.argument("shards", metavar="URL"),
    click.option(
        "--graph",
        help=f"The graph: {', '.join(GRAPHS)}, or your own function as package.module:function.  [default: "
        "segmentation if the data set has masks, else classification_train]",
    ),
    click.option("--crop", type=click.IntRange(min=1), help="Side of the crop in pixels.  [default: the graph's own]"),
    click.option("--photo", help="Component that holds the photo.  [default: the only one]"),
    click.option("--mask", help="Component that holds the mask.  [default: the only one]"),
    click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1), help="Samples in a batch."),
    click.option(
        "--device",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "cpu", "gpu"]),
        help="Where batches are decoded; auto takes a GPU if there is one.",
    ),
    click.option(
        "--cache",
        "cache_dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Directory for the cache file.  [default: /dev/shm, or the directory for temporary files]",
    ),
    click.option(
        "--cache-bytes",
        type=size,
        help="Limit of all cache files in that directory.  [default: half of free memory, or nine tenths of a disk's "
        "free space]",
    ),
    cluster_options,
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of a training's loader."""

    shards: str
    graph: str | None
    """``None``: by what the data set has, see `ChosenGraph`."""
    crop: int | None
    photo: str | None
    mask: str | None
    batch_size: int
    device: Any
    cache_dir: Path | None
    cache_bytes: int | None
    endpoint: str | None
    embedded_dir: Path | None

    @property
    def cache(self) -> "Cache":
        from dali_pipes.options import Cache

        patience = current_patience()
        return Cache(
            directory=self.cache_dir,
            max_bytes=self.cache_bytes,
            patience_s=patience.patience_s,
            start_patience_s=patience.start_s,
        )

    @functools.cached_property
    def made_graph(self) -> "Graph":
        """The graph; see `find_graph`."""
        return find_graph(self.graph, crop=self.crop, photo=self.photo, mask=self.mask)

    @contextlib.contextmanager
    def open(self, **options: Any) -> "Iterator[Loader]":
        """Open the loader, with more of its arguments."""
        import dali_pipes as dp

        graph = self.made_graph
        with (
            endpoint_for(self.shards, self.endpoint, self.embedded_dir) as endpoint,
            dp.loader(
                self.shards,
                graph,
                batch_size=self.batch_size,
                device=self.device,
                endpoint=endpoint,
                # One process, even under a launcher.
                rank=0,
                world_size=1,
                **({"cache": self.cache} | options),
            ) as loader,
        ):
            if isinstance(graph, ChosenGraph):
                masks = "masks" if graph.name == "segmentation" else "no masks"
                print_note(f"graph: {graph.name}, because the data set has {masks}; see --graph")
            yield loader

    def to_json(self) -> dict[str, Any]:
        """List the arguments on which measurements depend, without endpoint and directories, which name machines.

        The graph is known when the loader has been opened.
        """
        names = ("graph", "crop", "batch_size", "device", "cache_bytes")
        chosen = {"graph": self.made_graph.name} if isinstance(self.made_graph, ChosenGraph) else {}
        return {name: getattr(self, name) for name in names} | chosen


class ChosenGraph:
    """A graph that is `segmentation` on a data set with masks, and `classification_train` on others.

    Args:
        crop: Side of the crop; ``None``: the graph's own.
        photo: The component that holds the photo; ``None``: the only one.
        mask: The component that holds the mask; ``None``: the only one. If it is named, the graph is `segmentation`.
    """

    def __init__(self, *, crop: int | None = None, photo: str | None = None, mask: str | None = None) -> None:
        self._crop, self._photo, self._mask = crop, photo, mask
        self.name = ""
        """The graph that was chosen; empty before a data set is opened with it."""

    def __call__(self, components: "Components", random: "Random") -> "Mapping[str, Any]":
        """Choose the graph, and call it."""
        photo = components.photo(self._photo, besides=self._mask)
        is_masked = self._mask is not None or components.has_mask(photo=photo)
        self.name = "segmentation" if is_masked else "classification_train"
        graph = find_graph(self.name, crop=self._crop, photo=photo, mask=self._mask)
        return graph(components, random)


def find_graph(name: str | None, *, crop: int | None, photo: str | None, mask: str | None) -> "Graph":
    """Make one of `GRAPHS` with these arguments, or import ``package.module:function``, which takes none of them.

    ``None`` is the graph that fits the data set: `ChosenGraph`.

    Raises:
        ValueError: If there is no such graph, or a graph without a mask is given one.
    """
    if name is None:
        return ChosenGraph(crop=crop, photo=photo, mask=mask)
    if ":" in name:
        return _import_graph(name)
    if name not in GRAPHS:
        raise ValueError(f"--graph must be one of {', '.join(GRAPHS)}, or package.module:function, got '{name}'")
    from dali_pipes.graph import pipelines

    if mask is not None and name != "segmentation":
        raise ValueError(f"--mask '{mask}' is for --graph segmentation, got --graph {name}; drop one of them")
    arguments: dict[str, Any] = {"photo": photo} | ({} if crop is None else {"crop": crop})
    if name == "segmentation":
        arguments["mask"] = mask
    if name == "classification_eval" and crop is not None and crop > 256:
        arguments["resize"] = crop  # its default, 256, is for crops up to that
    graph: Graph = getattr(pipelines, name)(**arguments)
    return graph


def _import_graph(name: str) -> "Graph":
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # modules beside a script, as `python -m` finds them
    try:
        found: Graph = getattr(importlib.import_module(module_name), attribute)
    except ImportError as exc:
        raise ValueError(f"--graph '{name}': cannot import '{module_name}': {exc}") from exc
    except AttributeError:
        raise ValueError(f"--graph '{name}': module '{module_name}' has no '{attribute}'") from None
    if not callable(found):
        raise ValueError(f"--graph '{name}': expected a function, found {type(found).__name__}")
    return found
