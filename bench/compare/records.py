"""Compute the figures of a turn from what its ranks measured, and write a loader's part of a run's record."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bench.compare.data import DataFacts
from bench.compare.ranks import MIB, Turn
from bench.compare.settings import TurnSetting
from bench.loaders.protocol import Prepared
from bench.loaders.selection import LoaderSpec

if TYPE_CHECKING:
    from bench.compare.turn import Drawn, Spent


def record_of(
    spec: LoaderSpec,
    setting: TurnSetting,
    turns: Sequence[Turn],
    *,
    facts: DataFacts,
    prepared: Sequence[Prepared | None],
) -> dict[str, Any]:
    one = turns[-1].ranks[0]
    made = [part for part in prepared if part is not None]
    return {
        "loader": spec.name,
        "decode": one.decode,
        "device": one.device,
        "num_workers": one.num_workers,
        "gives": list(one.gives),
        "setting": setting.to_json(),
        "prepared": {"wall_s": sum(part.wall_s for part in made), "num_bytes": sum(part.num_bytes for part in made)}
        if made
        else None,
        "repeats": [_repeat(turn, setting, facts) for turn in turns],
    }


def _repeat(turn: Turn, setting: TurnSetting, facts: DataFacts) -> dict[str, Any]:
    return {
        "figures": figures_of(turn, setting=setting, facts=facts),
        "start_mib": turn.start_mib,
        "peak_mib": turn.peak_mib,
        "shared_memory_mib": turn.shared_memory_mib,
        "ranks": [
            {
                name: None if drawn is None else _drawn(drawn, spent)
                for name, drawn, spent in (
                    ("first", rank.first, rank.first_spent),
                    ("steady", rank.steady, rank.steady_spent),
                )
            }
            for rank in turn.ranks
        ],
    }


def _drawn(drawn: "Drawn", spent: "Spent | None") -> dict[str, Any]:
    row: dict[str, Any] = {
        "num_samples": drawn.num_samples,
        "num_epochs": drawn.num_epochs,
        "elapsed_s": drawn.elapsed_s,
        "ends_s": drawn.ends_s,
        # A line, not one each: there may be thousands.
        "waits_us": " ".join(str(round(1e6 * wait)) for wait in drawn.waits_s),
    }
    if spent is not None:
        row["cpu_s"] = spent.cpu_s
        row["traffic"] = None if spent.traffic is None else asdict(spent.traffic)
    return row


def figures_of(turn: Turn, *, setting: TurnSetting, facts: DataFacts) -> dict[str, float | None]:
    """Compute the figures of one turn, by the names of `FIGURES`; ``None`` for those that were not measured."""
    firsts = [rank.first for rank in turn.ranks]
    timed = [rank.steady if rank.steady is not None else rank.first for rank in turn.ranks]
    measured = turn.ranks[0]
    spent = measured.steady_spent if measured.steady is not None else measured.first_spent
    assert spent is not None, "the first rank measures"
    assert measured.first_spent is not None, "the first rank measures"
    epochs = timed[0].num_epochs
    num_samples = sum(drawn.num_samples for drawn in timed)
    elapsed_s = max(drawn.elapsed_s for drawn in timed)
    waits_s = [wait for drawn in timed for wait in drawn.waits_s]
    growth = turn.peak_mib - turn.start_mib
    return {
        "samples_per_s": num_samples / elapsed_s,
        "mib_per_s": epochs * facts.shard_bytes / MIB / elapsed_s,
        "cpu_ms_per_sample": 1000 * spent.cpu_s / num_samples,
        "time_to_first_batch_s": max(drawn.waits_s[0] for drawn in firsts),
        "batch_p50_ms": 1000 * percentile(waits_s, 50),
        "batch_p99_ms": 1000 * percentile(waits_s, 99),
        "batch_max_ms": 1000 * max(waits_s),
        "wait_share": sum(sum(drawn.waits_s) + drawn.ends_s for drawn in timed)
        / sum(drawn.elapsed_s for drawn in timed),
        "accelerator_utilisation": _utilisation(timed, setting),
        "peak_memory_mib": turn.peak_mib,
        "loader_memory_mib": growth,
        "memory_mib_per_sample": growth / (setting.batch_size * setting.ranks),
        "shared_memory_mib": turn.shared_memory_mib,
        "fetched_ratio": _fetched(spent, facts, epochs=epochs),
        "first_fetched_ratio": _fetched(measured.first_spent, facts, epochs=1),
        "first_epoch_s": max(drawn.elapsed_s for drawn in firsts),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of the values do not exceed.

    >>> percentile([3.0, 1.0, 2.0], 99)
    3.0
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _utilisation(timed: "Sequence[Drawn]", setting: TurnSetting) -> float | None:
    """Average the utilisation over the ranks.

    The rules (mlcommons/storage, Submission_guidelines.md, "Performance Metrics", v2.0) divide the total compute time
    by the total running time. The compute time is the emulated sleep: samples of an accelerator / batch size x its
    nominal length. The running time leaves out the wait for the first step's input.
    """
    if setting.compute_ms <= 0:
        return None
    return statistics.fmean(
        drawn.num_samples / setting.batch_size * setting.compute_ms / 1000 / (drawn.elapsed_s - drawn.waits_s[0])
        for drawn in timed
    )


def _fetched(spent: "Spent", facts: DataFacts, *, epochs: int) -> float | None:
    return None if spent.traffic is None else spent.traffic.num_bytes / epochs / facts.needed_bytes
