"""Records of runs that never were, for the tests of what is made of records."""

from typing import Any

from bench.loaders.protocol import PARTS

SEVEN = (0.97, 1.0, 1.03, 0.99, 1.01, 1.3, 0.98)
"""What each of seven turns is of the figure; one was slower."""


def record(
    loader: str,
    samples_per_s: float,
    cpu_ms: float,
    *,
    decode: str = "pil",
    turns: tuple[float, ...] = SEVEN,
    setting: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One loader under one setting."""
    usual = {"threads": 2, "ranks": 1, "batch_size": 64, "cache": "warm", "compute_ms": 40.0}
    parts = sorted(PARTS["segmentation"])
    figures = [
        {
            "samples_per_s": samples_per_s / turn,
            "cpu_ms_per_sample": cpu_ms * turn,
            "time_to_first_batch_s": 0.5 * turn,
            "wait_share": 0.25,
            "accelerator_utilisation": None,
        }
        for turn in turns
    ]
    return {
        "loader": loader,
        "decode": decode,
        "device": "cpu",
        "num_workers": 0,
        "gives": parts,
        "parts": parts,
        "setting": usual | (setting or {}),
        "data": 0,
        "outputs": {"num_samples": 22},
        "prepared": None,
        "repeats": [{"figures": one} for one in figures],
        **more,
    }


def report(*records: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A run of these."""
    return {
        "format": "dali-pipes-bench-run",
        "version": 2,
        "command": "dali-pipes bench run --shards .../pets",
        "environment": {
            "date": "2026-11-21T10:00:00+00:00",
            "commit": "0123456789abcdef",
            "is_dirty": True,
            "versions": {"torch": "2.15.0"},
            "cpu": {"model": "AMD EPYC", "cores_available": 2, "load_average_1min": 1.5},
            "memory_gib": 23.5,
            "gpus": [],
        },
        "options": {"photo": "image.jpg", "seed": 7, "repeats": 7, "epochs": 1, "source": "local files"},
        "data": [{"num_samples": 22, "num_shards": 3, "shard_bytes": 1 << 20, "digest": "d" * 64}],
        "baseline": "webloader",
        "records": list(records),
        **more,
    }
