"""Write a page of a data set: its figures, some of its samples, and what is bad.

The figures of the whole set come from manifest and shard indexes; of the shards only the samples that are shown are
read. The page's size is bounded, see `SAMPLE_BYTES` and `REST_BYTES`.
"""

import base64
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dali_pipes.errors import DataError, printable
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.quarantine import Exclusion
from dali_pipes.progress import bar
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.chosen import choose_samples, class_ids
from prep.inspect.contact_sheet import OPACITY, TILE, mask_colours
from prep.inspect.findings import ShardFinding
from prep.inspect.html import data_script, html_document, own_file
from prep.inspect.index_problems import MAX_LISTED, IndexProblems
from prep.inspect.indexed_set import IndexedSet
from prep.inspect.info import IndexColumns, SetInfo
from prep.inspect.shown_sample import CAPTION_CHARS, ShownSample, read_sample
from prep.inspect.view import MAX_CELLS
from prep.inspect.view_figures import bad_part, class_part, head_part, photo_parts, samples_part, shard_part
from prep.left_out import as_reason

PICTURE_BYTES = 12 << 10
"""The most bytes of a thumbnail, and of the mask over it, before base64 adds a third."""
SAMPLE_BYTES = 48 << 10
"""The most that a sample adds to a page: thumbnail, mask, boxes, texts."""
REST_BYTES = 4 << 20
"""The most that everything else takes: charts, tables, lists."""
_QUALITIES = (75, 50, 25, 10)
_NAME_CHARS = 120


@dataclass(kw_only=True)
class Page:
    """A page and its contents."""

    html: str
    keys: list[str]
    """Keys of the samples, in order."""
    num_matching: int
    """The number of samples from which they were drawn."""
    bad: dict[str, int]
    """Kind of finding, see `prep.inspect.findings.KINDS`, or ``quarantine`` -> number of findings."""


def view_page(
    shards: ShardSet,
    *,
    num: int = 200,
    seed: int = 0,
    labels: Sequence[str] = (),
    keys: Sequence[str] = (),
    photo: str | None = None,
    mask: str | None = None,
    known_bad: Sequence[Exclusion] = (),
    show_progress: bool = False,
) -> Page:
    """Write a page of some shards; it has at most ``num * SAMPLE_BYTES + REST_BYTES`` bytes.

    Args:
        shards: The shards.
        num: The most samples.
        seed: Draws the samples; they are shown in the shards' order.
        labels: Class ids or names: only samples of these classes. Empty: of all classes.
        keys: Only samples with these keys, in this order; then ``seed`` is not used.
        photo: The component to show; ``None``: the first photo that is not a mask, where there is one.
        mask: The component to lay over it; ``None``: the first mask; an empty name: no mask.
        known_bad: Samples that a quarantine lists, with their causes; the page lists them, too.
        show_progress: Draw bars.

    Raises:
        DataError: If there is no sample, key, class or component of this name, or the manifest, an index or a shard
            cannot be read.
        ValueError: If ``num`` is not in [1, `prep.inspect.view.MAX_CELLS`].
    """
    if not 1 <= num <= MAX_CELLS:
        raise ValueError(f"num must be in [1, {MAX_CELLS}], got {num}")
    indexed = IndexedSet(shards, show_progress=show_progress)
    manifest = indexed.manifest
    if not manifest.num_samples:
        raise DataError(f"'{shards.url}' holds no sample to show")
    chosen, num_matching = choose_samples(indexed, class_ids(indexed, labels), keys, num=num, seed=seed)
    info, columns, problems = _add_up(indexed, chosen, show_progress=show_progress)
    samples = _read(indexed, chosen, photo=photo, mask=mask, show_progress=show_progress)
    findings, counts = _all_findings(problems, samples, known_bad)
    which = "as named" if keys else f"drawn by seed {seed}"
    about = f"{len(samples)} of {num_matching} samples, {which}" + (f"; class {', '.join(labels)}" if labels else "")
    body = [
        head_part(info, num_bad=sum(counts.values())),
        class_part(info),
        *photo_parts(info, columns.sizes),
        shard_part(manifest.names, manifest.shard_bytes),
        bad_part(findings, counts, max_listed=MAX_LISTED),
        samples_part(printable(about)),
        data_script("samples", _sample_data(samples, manifest, _colours(samples))),
    ]
    bad: Counter[str] = Counter()
    for (kind, _), number in counts.items():
        bad[kind] += number
    html = html_document(shards.url, body, styles=[own_file("view.css")], scripts=[own_file("view.js")])
    return Page(html=html, keys=[sample.key for sample in samples], num_matching=num_matching, bad=dict(bad))


def _add_up(
    indexed: IndexedSet, chosen: Sequence[tuple[int, int]], *, show_progress: bool
) -> tuple[SetInfo, IndexColumns, IndexProblems]:
    info, columns = SetInfo.of(indexed), IndexColumns()
    problems = IndexProblems(indexed.manifest, watched={(indexed.manifest.names[row], at) for row, at in chosen})
    with bar(what="indexes", total=info.num_shards, unit="shards", shown=show_progress, delay_s=1) as drawn:
        for row, index in indexed.each():
            columns.add(row, index)
            problems.add(index)
            drawn.update(1)
    columns.fill(info)
    for component, photo in info.photos.items():
        photo.is_mask = columns.is_mask(component)
    return info, columns, problems


def _read(
    indexed: IndexedSet, chosen: Sequence[tuple[int, int]], *, photo: str | None, mask: str | None, show_progress: bool
) -> list[ShownSample]:
    samples: list[ShownSample] = []
    row_of_index, index = -1, None
    with bar(what="view", total=len(chosen), unit="samples", shown=show_progress, delay_s=1) as drawn:
        for row, at in chosen:
            if index is None or row != row_of_index:
                row_of_index, index = row, indexed.read(row)
            samples.append(read_sample(indexed, row, at, index, side=TILE, photo=photo, mask=mask, with_texts=True))
            drawn.update(1)
    return samples


def _all_findings(
    problems: IndexProblems, samples: Sequence[ShownSample], known_bad: Sequence[Exclusion]
) -> tuple[list[tuple[ShardFinding, str]], Counter[tuple[str, str]]]:
    """Each finding with its origin, and how many there are by kind and reason; a photo found twice counts once."""
    found = [(finding, "index") for finding in problems.listed]
    counts = Counter(problems.counts)
    for finding in (problem for sample in samples for problem in sample.problems):
        if (finding.shard, finding.key, finding.component) not in problems.refused:
            counts["photo", as_reason(finding.text)] += 1
            found.append((finding, "pixels"))
    for number, one in enumerate(known_bad):
        text = one.cause or "is listed without a cause"
        counts["quarantine", as_reason(text)] += 1
        if number < MAX_LISTED:
            found.append((ShardFinding("quarantine", one.shard or "", one.key, one.component, text), one.where))
    return found, counts


def _colours(samples: Sequence[ShownSample]) -> dict[int, tuple[int, int, int]]:
    values: set[int] = set()
    for sample in samples:
        values.update([] if sample.mask is None else np.unique(sample.mask).tolist())
    return mask_colours(values)


def _sample_data(
    samples: Sequence[ShownSample], manifest: Manifest, colours: dict[int, tuple[int, int, int]]
) -> dict[str, Any]:
    """What the page's script shows: short names, since there is one of each for every sample."""
    labels = sorted({sample.label for sample in samples if sample.label is not None})
    names = [_short(manifest.classes.get(label, str(label))) for label in labels]
    number = {label: place for place, label in enumerate(labels)}
    return {
        # (as texts: JavaScript's numbers have 53 bits)
        "classes": [[name, str(label)] for name, label in zip(names, labels, strict=True)],
        "samples": [
            {
                "key": _short(sample.key),
                "shard": _short(sample.shard),
                "class": None if sample.label is None else number[sample.label],
                "size": list(sample.size),
                "photo": "" if sample.photo is None else _photo_uri(sample.photo),
                "mask": "" if sample.mask is None else _mask_uri(sample.mask, colours),
                "boxes": [[round(share, 4) for share in box] for box in sample.boxes],
                "caption": printable(sample.caption, max_chars=CAPTION_CHARS),
                "bad": "; ".join(_short(f"{problem.component} {problem.text}") for problem in sample.problems),
            }
            for sample in samples
        ],
    }


def _short(text: str) -> str:
    return printable(text, max_chars=_NAME_CHARS)


def _photo_uri(pixels: npt.NDArray[np.uint8]) -> str:
    picture = Image.fromarray(pixels)
    data = b""
    for quality in _QUALITIES:
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=quality)
        data = stream.getvalue()
        if len(data) <= PICTURE_BYTES:
            break
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


def _mask_uri(mask: npt.NDArray[np.uint8], colours: dict[int, tuple[int, int, int]]) -> str:
    """A picture of the mask's colours, transparent where a value has none; a mask of noise gets fewer pixels."""
    table = np.zeros((256, 3), np.uint8)
    opacity = np.zeros(256, np.uint8)
    for value, colour in colours.items():
        table[value], opacity[value] = colour, round(255 * OPACITY)
    data = b""
    for step in (1, 2, 4):
        picture = Image.fromarray(np.ascontiguousarray(mask[::step, ::step]))
        picture.putpalette(table.tobytes())
        stream = io.BytesIO()
        picture.save(stream, "PNG", transparency=opacity.tobytes(), optimize=True)
        data = stream.getvalue()
        if len(data) <= PICTURE_BYTES:
            break
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
