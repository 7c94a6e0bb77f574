"""Compute the figures of a turn from its ranks' measurements, and make the record of one loader."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bench.compare.data import DataFacts
from bench.compare.settings import TurnSetting
from bench.compare.turn import MIB, Drawn, Turn, TurnJob
from bench.loaders.registry import PARTS


def record_of(job: TurnJob, turns: Sequence[Turn], *, facts: DataFacts) -> dict[str, Any]:
    """Return the record of one loader under one setting, from at least one turn."""
    one = turns[-1].ranks[0]
    made = [part for part in job.prepared if part is not None]
    return {
        "loader": job.spec.name,
        "decode": one.decode,
        "device": one.device,
        "num_workers": one.num_workers,
        "gives": list(one.gives),
        "parts": sorted(PARTS[job.options.recipe]),
        "setting": job.setting.to_json(),
        "prepared": {"wall_s": sum(part.wall_s for part in made), "num_bytes": sum(part.num_bytes for part in made)}
        if made
        else None,
        "repeats": [
            {
                "figures": figures_of(turn, setting=job.setting, facts=facts),
                "start_mib": turn.start_mib,
                "peak_mib": turn.peak_mib,
                "shared_memory_mib": turn.shared_memory_mib,
                "ranks": [
                    {"first": _drawn(rank.first), "steady": None if rank.steady is None else _drawn(rank.steady)}
                    for rank in turn.ranks
                ],
            }
            for turn in turns
        ],
    }


def _drawn(drawn: Drawn) -> dict[str, Any]:
    row = asdict(drawn)
    # One line of text, because JSON would take a line for each of thousands.
    del row["epochs"]  # their sums are in the other fields
    row["waits_us"] = " ".join(str(round(1e6 * wait)) for wait in row.pop("waits_s"))
    if drawn.cpu_s is None:
        del row["cpu_s"], row["traffic"]
    return row


def figures_of(turn: Turn, *, setting: TurnSetting, facts: DataFacts) -> dict[str, float | None]:
    """Compute the figures of one turn, by the names of `FIGURES`; ``None`` for those that were not measured."""
    firsts, timed = [rank.first for rank in turn.ranks], [rank.timed for rank in turn.ranks]
    assert timed[0].cpu_s is not None, "the first rank measures"
    num_samples = sum(drawn.num_samples for drawn in timed)
    elapsed_s = max(drawn.elapsed_s for drawn in timed)
    waits_s = [wait for drawn in timed for wait in drawn.waits_s]
    # The smallest wait that at least 50 or 99 percent of the waits do not exceed.
    p50_s, p99_s = np.percentile(waits_s, (50, 99), method="inverted_cdf").tolist()
    waiting_s = sum(waits_s) + sum(drawn.ends_s for drawn in timed)
    growth = turn.peak_mib - turn.start_mib
    return {
        "samples_per_s": num_samples / elapsed_s,
        "mib_per_s": timed[0].num_epochs * facts.shard_bytes / MIB / elapsed_s,
        "cpu_ms_per_sample": 1000 * timed[0].cpu_s / num_samples,
        "time_to_first_batch_s": max(drawn.waits_s[0] for drawn in firsts),
        "batch_p50_ms": 1000 * p50_s,
        "batch_p99_ms": 1000 * p99_s,
        "batch_max_ms": 1000 * max(waits_s),
        "wait_share": waiting_s / sum(drawn.elapsed_s for drawn in timed),
        "accelerator_utilisation": _utilisation(timed, setting),
        "peak_memory_mib": turn.peak_mib,
        "loader_memory_mib": growth,
        "memory_mib_per_sample": growth / (setting.batch_size * setting.ranks),
        "shared_memory_mib": turn.shared_memory_mib,
        "fetched_ratio": _fetched(timed[0], facts),
        "first_fetched_ratio": _fetched(firsts[0], facts),
        "first_epoch_s": max(drawn.elapsed_s for drawn in firsts),
    }


def _utilisation(timed: Sequence[Drawn], setting: TurnSetting) -> float | None:
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


def _fetched(drawn: Drawn, facts: DataFacts) -> float | None:
    return None if drawn.traffic is None else drawn.traffic.num_bytes / drawn.num_epochs / facts.needed_bytes
