"""Two small networks from normalised photos to scores: short to read, and small enough to train on a CPU.

Normalisation is by group, not by batch: so ranks keep no statistics in which they could differ, and a batch of two
trains as well as one of 64.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

CHANNELS_PER_GROUP = 8


class UNet(nn.Module):
    """Scores for each pixel: float32 [B, 3, H, W] in, float32 [B, num_classes, H, W] out.

    Args:
        num_classes: Classes of a pixel.
        width: Channels at full resolution, a multiple of 8; each level below has twice as many.
        num_levels: Resolutions, each half of the previous one: H and W must be multiples of ``2 ** (num_levels - 1)``.
    """

    def __init__(self, *, num_classes: int, width: int = 8, num_levels: int = 5) -> None:
        super().__init__()
        widths = [width << level for level in range(num_levels)]
        self.down = nn.ModuleList(
            _block(before, after) for before, after in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(_block(3 * above, above) for above in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, photo: Tensor) -> Tensor:
        """Go down to the coarsest level, then up again, joined with the outputs of the way down."""
        kept: list[Tensor] = []
        x = photo
        for block in self.down:
            x = block(functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2.0), kept.pop()], dim=1))
        scores: Tensor = self.head(x)
        return scores


class Classifier(nn.Module):
    """Scores for each photo: float32 [B, 3, H, W] in, float32 [B, num_classes] out.

    Args:
        num_classes: Classes of a photo.
        width: Channels of the first level, a multiple of 8; each level below has twice as many.
        num_levels: Resolutions, each half of the previous one; the first is half of the photo's.
        dropout: Share of the features that a training step sets to 0.
    """

    def __init__(self, *, num_classes: int, width: int = 32, num_levels: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        widths = [width << level for level in range(num_levels)]
        self.levels = nn.ModuleList(
            _block(before, after) for before, after in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, photo: Tensor) -> Tensor:
        """Halve and convolve, level by level; then take the mean over the remaining pixels."""
        x = photo
        for block in self.levels:
            x = block(functional.max_pool2d(x, 2))
        scores: Tensor = self.head(self.dropout(x.mean(dim=(2, 3))))
        return scores


def _block(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [
            nn.Conv2d(channels, after, 3, padding=1, bias=False),
            nn.GroupNorm(after // CHANNELS_PER_GROUP, after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)
