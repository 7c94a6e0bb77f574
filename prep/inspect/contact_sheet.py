"""Draw samples of a set as one picture, a contact sheet: photos, their masks in colour, their labels."""

import colorsys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from dali_pipes.errors import DataError, printable
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.samples import ChosenSamples, ShownSample, ShowOptions

Pixels = npt.NDArray[np.uint8]

# A cell holds photo and overlay side by side, and the label below; lengths in pixels.
TILE = 176
TILE_GAP = 4
CELL_GAP = 24
MARGIN = 40
HEADER = 118
CAPTION = 30
NOTE_GAP = 12
COLUMNS = 4
# The title of a sheet with one sample needs this width.
LEAST_WIDTH = 2 * MARGIN + 2 * TILE + TILE_GAP

PAPER = (250, 250, 248)
INK = (34, 36, 40)
FAINT = (120, 124, 130)

TRIMAP_COLOURS = {
    1: ("foreground", (27, 158, 119)),
    2: ("background", (117, 112, 179)),
    3: ("boundary", (217, 95, 2)),
    0: ("outside the photo", (200, 200, 200)),
}
"""Mask value -> name and colour: three colours that colour-blind people can distinguish, and grey for the padding."""
OPACITY = 0.45
# The hues of other masks are steps of the golden angle, so that close values get hues that are far apart.
_GOLDEN_ANGLE = 137.508 / 360
# The most values in a legend.
_LEGEND_VALUES = 12


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


def overlaid(photo: Pixels, mask: Pixels, *, colours: Mapping[int, tuple[int, int, int]] | None = None) -> Pixels:
    """Lay the colours of the mask's values over the photo; pixels of values without a colour do not change.

    Args:
        photo: uint8 [height, width, 3].
        mask: uint8 [height, width].
        colours: Value -> red, green, blue; ``None``: see `TRIMAP_COLOURS`.
    """
    if colours is None:
        colours = {value: colour for value, (_, colour) in TRIMAP_COLOURS.items()}
    blended = photo.astype(np.float32)
    for value, colour in colours.items():
        here = mask == value
        # The padding of a crop is black in the photo, so it is drawn as the colour alone.
        opacity = 1.0 if value == 0 and colour == TRIMAP_COLOURS[0][1] else OPACITY
        blended[here] = blended[here] * (1 - opacity) + np.asarray(colour, np.float32) * opacity
    return np.rint(blended).astype(np.uint8)


def mask_colours(values: Iterable[int]) -> dict[int, tuple[int, int, int]]:
    """Choose a colour for each value of some masks: a trimap's colours if there are no values except 1, 2 and 3.

    For other masks, each value has the same colour in every sheet; value 0, the background of most masks, has none.

    >>> sorted(mask_colours([1, 2]))
    [1, 2]
    >>> sorted(mask_colours([0, 7, 255]))
    [7, 255]
    """
    named = sorted(set(values))
    if set(named) <= {1, 2, 3}:
        return {value: TRIMAP_COLOURS[value][1] for value in named}
    found = {}
    for value in named:
        if value:
            shares = colorsys.hsv_to_rgb(value * _GOLDEN_ANGLE % 1, 0.75, 0.9)
            red, green, blue = (round(255 * share) for share in shares)
            found[value] = (red, green, blue)
    return found


@dataclass(kw_only=True)
class Sheet:
    """A contact sheet and its contents."""

    picture: Image.Image
    keys: list[str]
    """Keys of the samples, in order."""
    num_matching: int
    """The number of samples from which they were drawn."""
    mask_values: list[int]
    """Values of the masks' pixels, sorted."""
    undecodable: list[str]
    """Components that could not be decoded, and the reasons; a gray field replaces such a photo."""


def draw_sheet(shards: ShardSet, options: ShowOptions, *, show_progress: bool = False) -> Sheet:
    """Draw samples of some shards as one picture.

    Raises:
        DataError: If there is no sample, key, class or component of this name, a sample has no photo, or the manifest,
            an index or a shard cannot be read.
    """
    chosen = ChosenSamples(shards, options, show_progress=show_progress)
    samples = chosen.read(side=TILE)
    values = values_of_masks(samples)
    picture = contact_sheet(
        [_cell(sample, chosen.indexed.manifest.classes) for sample in samples],
        title=shards.url,
        subtitle=chosen.about,
        colours=mask_colours(values),
    )
    return Sheet(
        picture=picture,
        keys=[sample.key for sample in samples],
        num_matching=chosen.num_matching,
        mask_values=values,
        undecodable=[str(problem) for sample in samples for problem in sample.problems],
    )


def values_of_masks(samples: Sequence[ShownSample]) -> list[int]:
    """All values of the samples' masks, sorted."""
    values: set[int] = set()
    for sample in samples:
        values.update([] if sample.mask is None else np.unique(sample.mask).tolist())
    return sorted(values)


def _cell(sample: ShownSample, classes: Mapping[int, str]) -> Cell:
    if sample.photo is None and not sample.problems:
        raise DataError(
            f"shard '{sample.shard}', key '{sample.key}': no photo to show (found: "
            f"{', '.join(sample.components) or 'none'})"
        )
    photo, note = sample.photo, sample.key
    if photo is None:
        photo, note = np.full((TILE, TILE, 3), 225, np.uint8), f"cannot be decoded: {sample.key}"
    elif sample.is_mask_of_another_shape:
        note = f"mask of another shape: {sample.key}"
    if sample.label is None:
        return Cell(photo=photo, mask=sample.mask, label=note)
    name = classes.get(sample.label)
    label = str(sample.label) if name is None else f"{name} ({sample.label})"
    return Cell(photo=photo, mask=sample.mask, label=label, note=note)


def contact_sheet(
    cells: Sequence[Cell],
    *,
    title: str,
    subtitle: str,
    colours: Mapping[int, tuple[int, int, int]] | None = None,
) -> Image.Image:
    """Draw cells in rows of four under a title and a legend; a photo keeps its shape within a square.

    Args:
        cells: The samples. If none has a mask, rows hold eight narrow cells, and there is no legend.
        title: The first line.
        subtitle: The second line, in smaller letters.
        colours: See `overlaid`.

    Raises:
        ValueError: If there is no cell.
    """
    if not cells:
        raise ValueError("a contact sheet needs at least one sample")
    has_masks = any(cell.mask is not None for cell in cells)
    most = COLUMNS if has_masks else 2 * COLUMNS
    columns = min(most, len(cells))
    rows = -(-len(cells) // columns)
    cell_width, cell_height = (2 * TILE + TILE_GAP if has_masks else TILE), TILE + CAPTION
    width = max(2 * MARGIN + columns * cell_width + (columns - 1) * CELL_GAP, LEAST_WIDTH)
    height = MARGIN + HEADER + rows * cell_height + (rows - 1) * CELL_GAP // 2 + MARGIN
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)

    title_font, font = ImageFont.load_default(30), ImageFont.load_default(16)
    draw.text((MARGIN, MARGIN - 6), _shortened(draw, title, title_font, width - 2 * MARGIN), INK, font=title_font)
    draw.text((MARGIN, MARGIN + 36), _shortened(draw, subtitle, font, width - 2 * MARGIN), FAINT, font=font)
    if has_masks:
        _draw_legend(draw, (MARGIN, MARGIN + 74), _legend(colours))
    for number, cell in enumerate(cells):
        left = MARGIN + number % columns * (cell_width + CELL_GAP)
        top = MARGIN + HEADER + number // columns * (cell_height + CELL_GAP // 2)
        _draw_cell(sheet, draw, cell, (left, top), cell_width, colours)
    return sheet


def _legend(colours: Mapping[int, tuple[int, int, int]] | None) -> list[tuple[str, tuple[int, int, int]]]:
    if colours is None:
        return list(TRIMAP_COLOURS.values())
    is_trimap = all(TRIMAP_COLOURS.get(value, ("", ()))[1] == colour for value, colour in colours.items())
    named = [(TRIMAP_COLOURS[value][0] if is_trimap else str(value), colour) for value, colour in colours.items()]
    more = [(f"and {len(named) - _LEGEND_VALUES} more", PAPER)] if len(named) > _LEGEND_VALUES else []
    return named[:_LEGEND_VALUES] + more


def _draw_legend(
    draw: ImageDraw.ImageDraw, corner: tuple[int, int], named: Sequence[tuple[str, tuple[int, int, int]]]
) -> None:
    left, top = corner
    font = ImageFont.load_default(15)
    for name, colour in named:
        draw.rounded_rectangle((left, top, left + 18, top + 18), radius=4, fill=colour)
        draw.text((left + 26, top), name, INK, font=font)
        left += 26 + int(draw.textlength(name, font=font)) + 28


def _draw_cell(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    cell: Cell,
    corner: tuple[int, int],
    width: int,
    colours: Mapping[int, tuple[int, int, int]] | None,
) -> None:
    left, top = corner
    sheet.paste(_tile(cell.photo), (left, top))
    if cell.mask is not None:
        sheet.paste(_tile(overlaid(cell.photo, cell.mask, colours=colours)), (left + TILE + TILE_GAP, top))
    font, note_font = ImageFont.load_default(16), ImageFont.load_default(13)
    label = _shortened(draw, cell.label, font, width)
    draw.text((left, top + TILE + 6), label, INK, font=font)
    left_over = width - draw.textlength(label, font=font) - NOTE_GAP
    note = _shortened(draw, cell.note, note_font, left_over)
    if note:
        # Right-aligned, on the label's baseline.
        draw.text((left + width, top + TILE + 6 + font.getbbox("x")[3]), note, FAINT, font=note_font, anchor="rs")


def _shortened(draw: ImageDraw.ImageDraw, text: str, font: Any, width: float) -> str:
    """Shorten a text to one line that fits, with an ellipsis; return an empty text if one letter does not fit."""
    text = printable(text)  # Pillow refuses to measure several lines, and measuring a long text takes long
    while text and draw.textlength(text, font=font) > width:
        text = f"{text.removesuffix('…')[:-1]}…" if len(text) > 1 else ""
    return text


def _tile(pixels: Pixels) -> Image.Image:
    """Draw a photo as large as possible in the middle of a square."""
    height, width = pixels.shape[:2]
    fitting = (max(1, TILE * width // max(height, width)), max(1, TILE * height // max(height, width)))
    tile = Image.new("RGB", (TILE, TILE), PAPER)
    photo = Image.fromarray(pixels).resize(fitting, Image.Resampling.LANCZOS)
    tile.paste(photo, ((TILE - fitting[0]) // 2, (TILE - fitting[1]) // 2))
    return tile
