"""Draw docs/pictures/order.svg, the picture of the order of a plan: ``make reference``."""

from pathlib import Path
from typing import Any

import numpy as np

from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.plan import Batching, Plan

NUM_SHARDS, SHARD_SAMPLES = 8, 24
SIDE, GAP, TOP = 240, 28, 46
# Okabe and Ito's colours, which colour-blind readers can tell apart, and a grey that shows on black and white.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b3a100", "#808080")

PANELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("shuffle=False", "in the manifest's order", {"shuffle": False}),
    ("window_bytes=2 shards", "two shards at a time are resident", {"shuffle_window": 2 * SHARD_SAMPLES}),
    ('window_bytes="all"', "an exact shuffle of everything", {"shuffle_window": "all"}),
)


def order_picture() -> str:
    """Draw three orders of the same eight shards: a dot for each sample, at the time it is read and where it lies."""
    num = NUM_SHARDS * SHARD_SAMPLES
    parts = []
    for number, (title, text, options) in enumerate(PANELS):
        left = number * (SIDE + GAP)
        plan = Plan(
            shard_bytes=np.full(NUM_SHARDS, SHARD_SAMPLES),
            shard_samples=np.full(NUM_SHARDS, SHARD_SAMPLES),
            order=OrderInputs(seed=7, **options),
        )
        order = np.concatenate([step.ordinals for step in plan.steps(Batching(batch_size=num))])
        parts.append(f'<text x="{left}" y="16" class="title">{title.replace(chr(34), "&quot;")}</text>')
        parts.append(f'<text x="{left}" y="34">{text}</text>')
        parts.append(f'<rect x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}" class="frame"/>')
        for position, ordinal in enumerate(order.tolist()):
            x, y = (left + SIDE * (position + 0.5) / num, TOP + SIDE * (ordinal + 0.5) / num)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.9" fill="{COLOURS[ordinal // SHARD_SAMPLES]}"/>')
    width, height = len(PANELS) * (SIDE + GAP) - GAP, TOP + SIDE + 24
    parts.append(
        f'<text x="0" y="{height - 6}">across: when a sample is read; down: where it lies; one colour per shard</text>'
    )
    style = (
        "text{font:13px system-ui,sans-serif;fill:#222}.title{font-weight:600}.frame{fill:none;stroke:#999}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>Three orders of the same eight shards</title><style>{style}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    """Write it."""
    (Path(__file__).parent / "pictures" / "order.svg").write_text(order_picture())


if __name__ == "__main__":
    main()
