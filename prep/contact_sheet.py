"""Batches to one picture: photos as the model sees them, their masks in colour, their labels in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

__all__ = ["Cell", "contact_sheet", "denormalised", "overlaid"]

Pixels = npt.NDArray[np.uint8]

# One cell is photo and overlay side by side, the label below; lengths in pixels.
TILE = 176
TILE_GAP = 4
CELL_GAP = 24
MARGIN = 40
HEADER = 118
CAPTION = 30
NOTE_GAP = 12
COLUMNS = 4

PAPER = (250, 250, 248)
INK = (34, 36, 40)
FAINT = (120, 124, 130)

TRIMAP_COLOURS = {
    1: ("foreground", (27, 158, 119)),
    2: ("background", (117, 112, 179)),
    3: ("boundary", (217, 95, 2)),
    0: ("outside the photo", (200, 200, 200)),
}
"""Mask value -> name and colour: three that people with colour-blindness tell apart, and grey for the padding."""
OPACITY = 0.45


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One sample of the sheet."""

    photo: Pixels
    """uint8 [side, side, 3]."""
    mask: Pixels
    """uint8 [side, side], the values of `TRIMAP_COLOURS`."""
    label: str
    note: str = ""
    """What stands behind the label, in a fainter tone."""


def denormalised(image: Any, *, mean: Sequence[float], std: Sequence[float]) -> Pixels:
    """What ``(pixel / 255 - mean) / std`` was made of: float [3, side, side] to uint8 [side, side, 3]."""
    values = np.asarray(image, np.float32).transpose(1, 2, 0)
    pixels = (values * np.asarray(std, np.float32) + np.asarray(mean, np.float32)) * 255
    return np.rint(pixels).clip(0, 255).astype(np.uint8)


def overlaid(photo: Pixels, mask: Pixels) -> Pixels:
    """The photo with each mask value's colour over it; values without a colour are left as they are."""
    blended = photo.astype(np.float32)
    for value, (_, colour) in TRIMAP_COLOURS.items():
        here = mask == value
        # What the crop padded is black in the photo: the colour alone.
        opacity = 1.0 if value == 0 else OPACITY
        blended[here] = blended[here] * (1 - opacity) + np.asarray(colour, np.float32) * opacity
    return np.rint(blended).astype(np.uint8)


def contact_sheet(cells: Sequence[Cell], *, title: str, subtitle: str) -> Image.Image:
    """Cells in rows of four under a title and a legend.

    Raises:
        ValueError: If there is no cell.
    """
    if not cells:
        raise ValueError("a contact sheet needs at least one sample")
    columns = min(COLUMNS, len(cells))
    rows = -(-len(cells) // columns)
    cell_width, cell_height = 2 * TILE + TILE_GAP, TILE + CAPTION
    width = 2 * MARGIN + columns * cell_width + (columns - 1) * CELL_GAP
    height = MARGIN + HEADER + rows * cell_height + (rows - 1) * CELL_GAP // 2 + MARGIN
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)

    draw.text((MARGIN, MARGIN - 6), title, INK, font=ImageFont.load_default(30))
    draw.text((MARGIN, MARGIN + 36), subtitle, FAINT, font=ImageFont.load_default(16))
    _draw_legend(draw, (MARGIN, MARGIN + 74))
    for number, cell in enumerate(cells):
        left = MARGIN + number % columns * (cell_width + CELL_GAP)
        top = MARGIN + HEADER + number // columns * (cell_height + CELL_GAP // 2)
        _draw_cell(sheet, draw, cell, (left, top))
    return sheet


def _draw_legend(draw: ImageDraw.ImageDraw, corner: tuple[int, int]) -> None:
    left, top = corner
    font = ImageFont.load_default(15)
    for name, colour in TRIMAP_COLOURS.values():
        draw.rounded_rectangle((left, top, left + 18, top + 18), radius=4, fill=colour)
        draw.text((left + 26, top), name, INK, font=font)
        left += 26 + int(draw.textlength(name, font=font)) + 28


def _draw_cell(sheet: Image.Image, draw: ImageDraw.ImageDraw, cell: Cell, corner: tuple[int, int]) -> None:
    left, top = corner
    sheet.paste(_tile(cell.photo), (left, top))
    sheet.paste(_tile(overlaid(cell.photo, cell.mask)), (left + TILE + TILE_GAP, top))
    font, note_font = ImageFont.load_default(16), ImageFont.load_default(13)
    width = 2 * TILE + TILE_GAP
    label = _shortened(draw, cell.label, font, width)
    draw.text((left, top + TILE + 6), label, INK, font=font)
    left_over = width - draw.textlength(label, font=font) - NOTE_GAP
    note = _shortened(draw, cell.note, note_font, left_over)
    if note:
        # Right-aligned, on the label's baseline.
        draw.text((left + width, top + TILE + 6 + font.getbbox("x")[3]), note, FAINT, font=note_font, anchor="rs")


def _shortened(draw: ImageDraw.ImageDraw, text: str, font: Any, width: float) -> str:
    """``text``, or as much of its start as fits with an ellipsis; nothing where not even that does."""
    while text and draw.textlength(text, font=font) > width:
        text = f"{text.removesuffix('…')[:-1]}…" if len(text) > 1 else ""
    return text


def _tile(pixels: Pixels) -> Image.Image:
    return Image.fromarray(pixels).resize((TILE, TILE), Image.Resampling.LANCZOS)
