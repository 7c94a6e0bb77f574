"""The command-line options of both trainings."""

import argparse
from pathlib import Path


def make_parser(description: str, *, batch_size: int, crop: int, width: int, lr: float) -> argparse.ArgumentParser:
    """Return a parser of the options that both programs have, with one program's defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add(
        "--shards",
        nargs="+",
        required=True,
        metavar="URL",
        help="indexed shards: ais://pets/shuffled-, a directory, ...",
    )
    add("--val-shards", nargs="+", default=[], metavar="URL", help="shards for the validation after each epoch")
    add("--out", type=Path, required=True, metavar="DIR", help="the run's directory: checkpoint.pt and steps.jsonl")
    add("--resume", action="store_true", help="continue from the checkpoint in --out, if there is one")
    add(
        "--checkpoint-every", type=_positive, default=100, metavar="STEPS", help="steps from one checkpoint to the next"
    )
    add("--epochs", type=_positive, default=30, help="passes over the training shards")
    add("--batch-size", type=_positive, default=batch_size, help="samples a step on each rank")
    add("--crop", type=_positive, default=crop, help="height and width of the crop")
    add("--width", type=_positive, default=width, help="channels of the model's first level, a multiple of 8")
    add("--lr", type=float, default=lr, help="learning rate of the first step; it falls to 0 as a cosine")
    add("--seed", type=int, default=0, help="fixes the model's start, the order and every augmentation")
    add(
        "--num-slices",
        type=_positive,
        default=1,
        help="number of nodes; each stages a share of the shards",
    )
    add("--cache-dir", type=Path, help="keep shards here for the next job; None: in memory, while this job runs")
    add("--metrics-port", type=_positive, help="serve the loaders' figures to Prometheus here; None: do not")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto takes the GPU if there is one")
    add(
        "--num-threads",
        type=_positive,
        default=1,
        help="torch's threads on the CPU; with another number, results differ by rounding",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got '{text}'")
    return int(text)
