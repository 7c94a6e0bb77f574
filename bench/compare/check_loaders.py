"""Compare the outputs of loaders with Pillow and torchvision, before anything is timed."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.compare.data import DataSets
from bench.compare.outputs import Comparison, Reference, compare_epoch, tolerance_of
from bench.compare.settings import TurnSetting
from bench.engine.scenario import failure_text
from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import LOADERS, is_peer
from bench.loaders.selection import LoaderSpec, open_loader
from dali_pipes.errors import PipesError


def compare_outputs(
    data: DataSets,
    specs: Sequence[LoaderSpec],
    settings: Sequence[TurnSetting],
    *,
    options: LoaderOptions,
    timeout_s: float,
    failed: dict[LoaderSpec, str] | None = None,
) -> dict[tuple[LoaderSpec, TurnSetting], Comparison]:
    """Compare the outputs of each loader for each setting.

    If ``failed`` is given, a peer that fails is left out and added to it, with its error; unless all loaders fail.

    Each loader is compared once for each data set and crop: threads, batch size, ranks and latency do not change what a
    sample becomes.

    Raises:
        OutputError: If a loader does not yield what the shards hold.
        PipesError: If a loader takes longer than ``timeout_s``, or cannot be opened.
    """
    compared: dict[tuple[object, ...], Comparison] = {}
    keeps_failures = failed is not None
    failed = {} if failed is None else failed
    found: dict[tuple[LoaderSpec, TurnSetting], Comparison] = {}
    for setting in settings:
        shards, _ = data.open(setting)
        kind = (shards.url, tuple(shards.names), setting.crop)
        if missing := [spec for spec in specs if spec not in failed and (spec, *kind) not in compared]:
            shared, whole = replace(options, crop=setting.crop), replace(setting, ranks=1)
            with Reference.open(shards, options=shared) as reference:
                for spec in missing:
                    try:
                        (prepared,) = data.prepared(spec.name, whole)
                        own = spec.apply(shared)
                        with (
                            _limited(timeout_s, what=f"loader '{spec}' ({whole})"),
                            open_loader(spec.name, shards, options=own, prepared=prepared) as loader,
                        ):
                            compared[spec, *kind] = compare_epoch(
                                loader.epoch(),
                                reference,
                                loader=str(spec),
                                tolerance=tolerance_of(
                                    decode=loader.decode, device=loader.device, recipe=shared.recipe
                                ),
                                gives=LOADERS[spec.name].gives,
                                show=f"compare {spec}",
                            )
                    except Exception as exc:
                        if not (keeps_failures and is_peer(spec.name)) or len(failed) + 1 == len(specs):
                            raise
                        failed[spec] = failure_text(exc)
        found |= {(spec, setting): compared[spec, *kind] for spec in specs if spec not in failed}
    return {key: comparison for key, comparison in found.items() if key[0] not in failed}


@contextlib.contextmanager
def _limited(timeout_s: float, *, what: str) -> Iterator[None]:
    """Interrupt this process if it hangs, as Ctrl-C would. Only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(signum: int, frame: object) -> None:
        raise PipesError(
            f"the outputs of {what} were not compared within {timeout_s:g} s: it hangs or needs more time; raise "
            "--timeout-s, or leave the loader out"
        )

    previous = signal.signal(signal.SIGALRM, late)
    # The timer repeats, because closing the loader may hang, too.
    earlier = signal.setitimer(signal.ITIMER_REAL, timeout_s, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *earlier)
        signal.signal(signal.SIGALRM, previous)
