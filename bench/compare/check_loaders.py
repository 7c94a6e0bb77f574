"""Compare what loaders give with Pillow and torchvision, before anything is timed."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.compare.data import DataSets
from bench.compare.outputs import Comparison, Reference, compare_epoch, tolerance_of
from bench.compare.settings import TurnSetting
from bench.loaders.opening import open_loader
from bench.loaders.protocol import LoaderOptions, Prepared
from bench.loaders.selection import LoaderSpec
from bench.reports.summary import setting_text
from dali_pipes.errors import PipesError

if TYPE_CHECKING:
    from dali_pipes.store.shard_set import ShardSet


def compare_outputs(
    data: DataSets,
    specs: Sequence[LoaderSpec],
    settings: Sequence[TurnSetting],
    *,
    options: LoaderOptions,
    timeout_s: float,
) -> dict[tuple[LoaderSpec, TurnSetting], Comparison]:
    """What each loader gives of each data set and crop, held against Pillow and torchvision; other things alike.

    A setting's threads, batches, ranks and latency do not change what a sample becomes.

    Raises:
        OutputError: If a loader does not yield what the shards hold.
        PipesError: If one takes longer than ``timeout_s``, or cannot be opened.
    """
    compared: dict[tuple[object, ...], Comparison] = {}
    found: dict[tuple[LoaderSpec, TurnSetting], Comparison] = {}
    for setting in settings:
        shards = data.open(setting).shards
        kind = (shards.url, shards.names, setting.crop)
        if missing := [spec for spec in specs if (spec, *kind) not in compared]:
            shared = replace(options, crop=setting.crop)
            whole = replace(setting, ranks=1)
            with Reference.open(shards, options=shared) as reference:
                for spec in missing:
                    (prepared,) = data.prepared(spec.name, whole)
                    with _limited(timeout_s, what=f"loader '{spec}' ({setting_text(whole.to_json())})"):
                        compared[spec, *kind] = _compare(spec, shards, reference, options=shared, prepared=prepared)
        found |= {(spec, setting): compared[spec, *kind] for spec in specs}
    return found


@contextlib.contextmanager
def _limited(timeout_s: float, *, what: str) -> Iterator[None]:
    """End what hangs in this process, as Ctrl-C would; only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(signum: int, frame: object) -> None:
        raise PipesError(
            f"{what} hangs, or needs longer: its outputs were not compared in {timeout_s:g} s; give it more with "
            "--timeout-s, or leave the loader out"
        )

    previous = signal.signal(signal.SIGALRM, late)
    # Again after as long: closing it may hang, too.
    earlier = signal.setitimer(signal.ITIMER_REAL, timeout_s, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *earlier)
        signal.signal(signal.SIGALRM, previous)


def _compare(
    spec: LoaderSpec, shards: "ShardSet", reference: Reference, *, options: LoaderOptions, prepared: Prepared | None
) -> Comparison:
    with open_loader(spec.name, shards, options=spec.apply(options), prepared=prepared) as loader:
        tolerance = tolerance_of(decode=loader.decode, device=loader.device)
        return compare_epoch(
            loader.epoch(),
            reference,
            loader=str(spec),
            tolerance=tolerance,
            gives=loader.gives,
            show=f"compare {spec}",
        )
