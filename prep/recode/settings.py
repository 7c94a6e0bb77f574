"""What to do to photos and masks before they are packed."""

from dataclasses import asdict, dataclass
from typing import Literal

DEFAULT_QUALITY = 90
"""The JPEG quality in which resized photos are usually kept; FFCV's published sizes have it, too."""


@dataclass(frozen=True, kw_only=True)
class Recoding:
    """Settings of `prep.recode.stage.recode_source`.

    Raises:
        ValueError: If a side or the quality is not valid, or ``masks`` is given and nothing is resized.
    """

    short_side: int | None = None
    """The largest shorter side of a photo, in pixels. A photo that is not larger keeps its bytes."""
    max_side: int | None = None
    """The largest longer side of a photo, in pixels; with ``short_side``, both hold."""
    quality: int = DEFAULT_QUALITY
    """The JPEG quality of photos that are resized or converted, 1 to 100."""
    masks: Literal["nearest"] | None = None
    """How masks are resized to their photo's new size: by the nearest neighbour. ``None``: there must be none."""
    optimize: bool = False
    """Rewrite JPEGs and masks without loss, so that they are decoded faster."""
    convert: bool = False
    """Make JPEGs of photos that loaders do not decode: HEIC, AVIF, TIFF, JPEG 2000, GIF and animated PNG."""

    def __post_init__(self) -> None:
        for name in ("short_side", "max_side"):
            side = getattr(self, name)
            if side is not None and (type(side) is not int or not 1 <= side <= 65_500):
                raise ValueError(f"{name} must be 1 to 65500 pixels (a JPEG's limit), got {side!r}")
        if type(self.quality) is not int or not 1 <= self.quality <= 100:
            raise ValueError(f"quality must be 1 to 100, got {self.quality!r}")
        if self.masks not in (None, "nearest"):
            raise ValueError(f"masks must be 'nearest' or None, got {self.masks!r}")
        if self.masks is not None and not self.resizes:
            raise ValueError("masks='nearest' says how masks are resized; it needs short_side or max_side")

    @property
    def resizes(self) -> bool:
        return self.short_side is not None or self.max_side is not None

    @property
    def is_on(self) -> bool:
        """Whether anything is to be done."""
        return self.resizes or self.optimize or self.convert

    def new_size(self, height: int, width: int) -> tuple[int, int] | None:
        """Height and width of a photo after it was resized; ``None`` if it stays: no photo is enlarged.

        >>> Recoding(short_side=256).new_size(375, 500), Recoding(max_side=256).new_size(375, 500)
        ((256, 341), (192, 256))
        >>> Recoding(short_side=256).new_size(256, 9000)
        """
        limits = ((self.short_side, min(height, width)), (self.max_side, max(height, width)))
        ratios = [(limit, side) for limit, side in limits if limit is not None and limit < side]
        if not ratios:
            return None
        limit, side = min(ratios, key=lambda ratio: ratio[0] / ratio[1])
        # Rounded half up, in whole numbers.
        rows, columns = ((2 * pixels * limit + side) // (2 * side) for pixels in (height, width))
        return max(1, rows), max(1, columns)

    def as_settings(self) -> dict[str, int | str | bool]:
        """The settings that are on, by name, as the manifest keeps them."""
        encodes = self.resizes or self.convert
        values = asdict(self) | {"quality": self.quality if encodes else None}
        return {name: value for name, value in values.items() if value not in (None, False)}
