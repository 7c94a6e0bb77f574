"""Draw samples of a set as one picture, a contact sheet: photos, their masks in colour, their labels."""

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont, ImageOps

from dali_pipes.errors import printable
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.samples import ChosenSamples, ShownSample, ShowOptions

Pixels = npt.NDArray[np.uint8]

# A cell holds photo and overlay side by side, and the label below; lengths in pixels.
TILE = 176
TILE_GAP = 4
CELL_GAP = 24
MARGIN = 40
HEADER = 84
CAPTION = 30
NOTE_GAP = 12
COLUMNS = 4
# The title of a sheet with one sample needs this width.
LEAST_WIDTH = 2 * MARGIN + 2 * TILE + TILE_GAP
PAPER, INK, FAINT = (250, 250, 248), (34, 36, 40), (120, 124, 130)

OPACITY = 0.45
_GOLDEN_ANGLE = 137.508 / 360
# Close values get hues that are far apart.
_HUES = (colorsys.hsv_to_rgb(value * _GOLDEN_ANGLE % 1, 0.75, 0.9) for value in range(256))
MASK_COLOURS = np.rint(255 * np.array([*_HUES])).astype(np.uint8)
"""uint8 [256, 3]: the colour of each value of a mask; value 0, the background of most masks, is not drawn."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One sample of the sheet."""

    photo: Pixels
    """uint8 [height, width, 3]."""
    mask: Pixels | None
    """uint8 [height, width]; ``None``: only the photo is drawn."""
    label: str
    note: str = ""
    """Text after the label, in a fainter tone."""


def denormalised(image: Any, *, mean: Sequence[float], std: Sequence[float]) -> Pixels:
    """Undo ``(pixel / 255 - mean) / std``: convert float [3, side, side] to uint8 [side, side, 3]."""
    values = np.asarray(image, np.float32).transpose(1, 2, 0)
    pixels = (values * np.asarray(std, np.float32) + np.asarray(mean, np.float32)) * 255
    return np.rint(pixels).clip(0, 255).astype(np.uint8)


def overlaid(photo: Pixels, mask: Pixels) -> Pixels:
    """Lay the colours of a mask's values over its photo, uint8 [height, width, 3]; where the mask is 0, nothing."""
    opacity = OPACITY * (mask[..., None] > 0)
    blended: Pixels = np.rint(photo * (1 - opacity) + MASK_COLOURS[mask] * opacity).astype(np.uint8)
    return blended


@dataclass(kw_only=True)
class Sheet:
    """A contact sheet and its contents."""

    picture: Image.Image
    keys: list[str]
    num_matching: int
    undecodable: list[str]
    """Components that could not be decoded, and the reasons; a gray field replaces such a photo."""


def draw_sheet(shards: ShardSet, options: ShowOptions, *, show_progress: bool = False) -> Sheet:
    """Draw samples of some shards as one picture; for errors see `ChosenSamples`."""
    chosen = ChosenSamples(shards, options, show_progress=show_progress)
    samples = chosen.read(side=TILE)
    cells = [_cell(sample, chosen.indexed.manifest.classes) for sample in samples]
    return Sheet(
        picture=contact_sheet(cells, title=shards.url, subtitle=chosen.about),
        keys=[sample.key for sample in samples],
        num_matching=chosen.num_matching,
        undecodable=[str(problem) for sample in samples for problem in sample.problems],
    )


def _cell(sample: ShownSample, classes: Mapping[int, str]) -> Cell:
    photo, note = sample.photo, sample.key
    if photo is None:
        photo = np.full((TILE, TILE, 3), 225, np.uint8)
        note = f"{'cannot be decoded' if sample.problems else 'no photo'}: {sample.key}"
    if sample.label is None:
        return Cell(photo=photo, mask=sample.mask, label=note)
    name = classes.get(sample.label)
    label = str(sample.label) if name is None else f"{name} ({sample.label})"
    return Cell(photo=photo, mask=sample.mask, label=label, note=note)


def contact_sheet(cells: Sequence[Cell], *, title: str, subtitle: str) -> Image.Image:
    """Draw cells in rows of four under two lines of text; without any mask, in rows of eight narrow ones."""
    has_masks = any(cell.mask is not None for cell in cells)
    columns = min(COLUMNS if has_masks else 2 * COLUMNS, max(1, len(cells)))
    rows = -(-len(cells) // columns)
    cell_width, cell_height = (2 * TILE + TILE_GAP if has_masks else TILE), TILE + CAPTION
    width = max(2 * MARGIN + columns * cell_width + (columns - 1) * CELL_GAP, LEAST_WIDTH)
    height = MARGIN + HEADER + rows * cell_height + (rows - 1) * CELL_GAP // 2 + MARGIN
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    title_font, font = ImageFont.load_default(30), ImageFont.load_default(16)
    draw.text((MARGIN, MARGIN - 6), _shortened(draw, title, title_font, width - 2 * MARGIN), INK, font=title_font)
    draw.text((MARGIN, MARGIN + 36), _shortened(draw, subtitle, font, width - 2 * MARGIN), FAINT, font=font)
    for number, cell in enumerate(cells):
        left = MARGIN + number % columns * (cell_width + CELL_GAP)
        top = MARGIN + HEADER + number // columns * (cell_height + CELL_GAP // 2)
        sheet.paste(_tile(cell.photo), (left, top))
        if cell.mask is not None:
            sheet.paste(_tile(overlaid(cell.photo, cell.mask)), (left + TILE + TILE_GAP, top))
        _draw_caption(draw, cell, left, top + TILE + 6, cell_width)
    return sheet


def _tile(pixels: Pixels) -> Image.Image:
    """A photo as large as possible in the middle of a tile."""
    return ImageOps.pad(Image.fromarray(pixels), (TILE, TILE), Image.Resampling.LANCZOS, color=PAPER)


def _draw_caption(draw: ImageDraw.ImageDraw, cell: Cell, left: int, top: int, width: int) -> None:
    """The label, and at the right, on the label's baseline, the note."""
    font, note_font = ImageFont.load_default(16), ImageFont.load_default(13)
    label = _shortened(draw, cell.label, font, width)
    draw.text((left, top), label, INK, font=font)
    note = _shortened(draw, cell.note, note_font, width - draw.textlength(label, font=font) - NOTE_GAP)
    draw.text((left + width, top + font.getbbox("x")[3]), note, FAINT, font=note_font, anchor="rs")


def _shortened(draw: ImageDraw.ImageDraw, text: str, font: Any, width: float) -> str:
    """Shorten a text to one line that fits, with an ellipsis; return an empty text if one letter does not fit."""
    text = printable(text)  # Pillow refuses to measure several lines, and measuring a long text takes long
    while text and draw.textlength(text, font=font) > width:
        text = f"{text.removesuffix('…')[:-1]}…" if len(text) > 1 else ""
    return text
