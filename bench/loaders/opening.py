"""Open a loader of the registry by its name, and convert the shards first if it reads another format."""

import contextlib
import importlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.loaders.protocol import BenchLoader, LoaderOptions, Prepared
from bench.loaders.registry import LOADERS
from bench.loaders.selection import reason_against
from dali_pipes.errors import PipesError
from dali_pipes.store.shard_set import ShardSet


def open_loader(
    name: str, shards: ShardSet, *, options: LoaderOptions, prepared: Prepared | None = None
) -> contextlib.AbstractContextManager[BenchLoader]:
    """Open the loader ``name``; leaving the context ends its threads and processes.

    Args:
        name: A name of `LOADERS`.
        shards: What it reads.
        options: What all loaders of a run share.
        prepared: What `prepare_loader` returned. Without it, a loader that needs a conversion makes one in a temporary
            directory while it is opened, so pass it if the opening is timed. Ignored by a loader that reads the index
            beside the shards.

    Raises:
        PipesError: If a package is missing (the error names the extra), or the loader cannot read such shards.
        ValueError: If there is no such loader.
    """
    module = _module(name, shards)
    if not hasattr(module, "prepare") or LOADERS[name].reads_index_beside:
        opened: contextlib.AbstractContextManager[BenchLoader] = module.open_loader(shards, options=options)
        return opened
    return _open_converted(module, name, shards, options=options, prepared=prepared)


@contextlib.contextmanager
def _open_converted(
    module: Any, name: str, shards: ShardSet, *, options: LoaderOptions, prepared: Prepared | None
) -> Iterator[BenchLoader]:
    with contextlib.ExitStack() as stack:
        if prepared is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dali-pipes-prepared-"))
            prepared = prepare_loader(name, shards, directory=Path(directory))
        yield stack.enter_context(module.open_loader(shards, options=options, prepared=prepared))


def prepare_loader(name: str, shards: ShardSet, *, directory: Path) -> Prepared | None:
    """Make what the loader ``name`` reads; ``None`` if it reads the shards as they are.

    Args:
        name: A name of `LOADERS`.
        shards: What to convert.
        directory: Empty, and owned by the caller. The loader reads from it while it is open. For a loader that reads
            the index beside the shards: a copy of that index, which only shows what making it takes.

    Raises:
        PipesError: As `open_loader`.
        ValueError: If there is no such loader.
    """
    module = _module(name, shards)
    if not hasattr(module, "prepare"):
        return None
    started = time.perf_counter()
    module.prepare(shards, directory=directory)
    return Prepared.of(directory, wall_s=time.perf_counter() - started)


def _module(name: str, shards: ShardSet) -> Any:
    if (reason := reason_against(name, shards)) is not None:
        raise PipesError(reason)
    return importlib.import_module(LOADERS[name].module)
