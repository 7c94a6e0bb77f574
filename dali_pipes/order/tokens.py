"""Describe batches with a budget of tokens: the patches of each photo, and photos packed into batches.

This is pure arithmetic on heights and widths, with correctly rounded float64 operations only: the same everywhere.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.arguments import as_integer
from dali_pipes.order.randomness import Int64s

# Batches that are open at a time while photos are packed. More fill a little better, and take longer to look through.
NUM_OPEN = 8


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """A largest number of tokens in a batch, of patches of photos with their own sizes. Made by `token_budget`."""

    max_tokens: int
    patch: int = 16
    max_photo_tokens: int
    photo: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "patch", "max_photo_tokens"):
            value = as_integer(name, getattr(self, name))
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
            object.__setattr__(self, name, value)
        if self.max_photo_tokens > self.max_tokens:
            raise ValueError(
                f"max_photo_tokens must not exceed max_tokens, got {self.max_photo_tokens} and {self.max_tokens}: such "
                "a photo would fit no batch"
            )
        if self.photo is not None and not isinstance(self.photo, str):
            raise TypeError(f"photo must be the name of a component, or None, got {self.photo!r}")

    @property
    def example(self) -> "TokenBudget":
        """What a batch has: the budget itself."""
        return self

    def grids(
        self, heights: npt.NDArray[Any], widths: npt.NDArray[Any], *, at_most: npt.NDArray[Any] | None = None
    ) -> Int64s:
        """Compute rows and columns of each photo's patches: int64 [N, 2].

        A photo is scaled down until it has at most ``max_photo_tokens`` patches, and is not enlarged, as in NaViT
        (Dehghani et al., 2023, "Patch n' Pack"). Its sides are then rounded down to whole patches, at least one; so the
        aspect ratio changes a little. A photo without a size, 0 x 0, has one patch.

        Args:
            heights: Rows of the photos, [N].
            widths: Their columns.
            at_most: Another limit for each photo instead of ``max_photo_tokens``, int [N].

        >>> budget = TokenBudget(max_tokens=4096, patch=16, max_photo_tokens=256)
        >>> budget.grids(np.array([480, 100, 0, 9]), np.array([640, 100, 0, 4000])).tolist()
        [[13, 18], [6, 6], [1, 1], [1, 250]]
        """
        limit = np.full(len(heights), self.max_photo_tokens) if at_most is None else np.asarray(at_most)
        sides = np.stack([heights, widths], axis=1).astype(np.float64) / self.patch
        area = sides[:, 0] * sides[:, 1]
        scale = np.sqrt(np.minimum(1, limit / np.where(area > 0, area, 1)))
        grids = np.maximum(1, np.floor(sides * scale[:, None])).astype(np.int64)
        # One side of a long photo was rounded up to one patch.
        return np.minimum(grids, np.maximum(1, limit[:, None] // grids[:, ::-1]))

    def tokens(self, heights: npt.NDArray[Any], widths: npt.NDArray[Any]) -> Int64s:
        """Count each photo's patches: int64 [N], from 1 to ``max_photo_tokens``."""
        grids = self.grids(heights, widths)
        return grids[:, 0] * grids[:, 1]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a state."""
        return {"kind": "tokens", **asdict(self)}


def token_budget(
    *, max_tokens: int, patch: int = 16, max_photo_tokens: int | None = None, photo: str | None = None
) -> TokenBudget:
    """Describe a budget of tokens, for ``Select(tokens=...)``: each batch has as many photos as fit it.

    Args:
        max_tokens: The largest number of patches in a batch of one rank.
        patch: Height and width of a patch, in pixels.
        max_photo_tokens: The largest number of patches of a photo; larger photos are scaled down. ``None``: as many as
            a batch, at most 1,024.
        photo: The component whose heights and widths count, as the graph names it; ``None``: the sample's only photo.

    Raises:
        TypeError, ValueError: If a value is impossible.

    >>> token_budget(max_tokens=4096).max_photo_tokens
    1024
    """
    if max_photo_tokens is None:
        max_photo_tokens = min(as_integer("max_tokens", max_tokens), 1024)
    return TokenBudget(max_tokens=max_tokens, patch=patch, max_photo_tokens=max_photo_tokens, photo=photo)


def pack_photos(tokens: Sequence[int], *, max_tokens: int, max_photos: int) -> list[list[int]]:
    """Pack photos into batches, in order: each into the first open batch that has space for it.

    At most `NUM_OPEN` batches are open. If none has space, another one is opened, and the oldest closed. It takes some
    microseconds a photo.

    Args:
        tokens: Of each photo, at most ``max_tokens``.
        max_tokens: Of a batch.
        max_photos: Of a batch.

    Returns:
        The numbers of the photos of each batch, in order; the batches in the order in which they were opened.

    >>> pack_photos([5, 6, 3, 4, 9], max_tokens=10, max_photos=9)
    [[0, 2], [1, 3], [4]]
    """
    packed: list[list[int]] = []
    spaces: list[int] = []  # what is left in each batch
    opened: list[int] = []  # numbers of batches
    for number, needed in enumerate(tokens):
        for batch in opened:
            if spaces[batch] >= needed:
                break
        else:
            if len(opened) == NUM_OPEN:
                del opened[0]
            batch = len(packed)
            packed.append([])
            spaces.append(max_tokens)
            opened.append(batch)
        packed[batch].append(number)
        spaces[batch] -= needed
        if not spaces[batch] or len(packed[batch]) == max_photos:
            opened.remove(batch)
    return packed
