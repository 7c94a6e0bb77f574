"""Write a page of a data set: its figures, some of its samples, and what is bad.

The figures of the whole set come from manifest and shard indexes; of the shards only the samples that are shown are
read. The page's size is bounded, see `SAMPLE_BYTES` and `REST_BYTES`.
"""

import base64
import io
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dali_pipes.arrays import Int64s
from dali_pipes.commands.options import format_bytes
from dali_pipes.errors import printable
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.photo_rules import PhotoRules
from dali_pipes.formats.quarantine import Exclusion
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.progress import bar
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.contact_sheet import OPACITY, TILE, mask_colours, values_of_masks
from prep.inspect.findings import (
    KINDS,
    ShardFinding,
    missing_components,
    refused_photos,
    unknown_labels,
    usual_components,
    wrong_mask_sizes,
)
from prep.inspect.html import (
    columns,
    data_script,
    figure,
    heat,
    html_document,
    html_table,
    own_file,
    round_ticks,
    short,
    text,
)
from prep.inspect.indexed_set import IndexedSet
from prep.inspect.info import Distribution, IndexColumns, PhotoInfo, SetInfo
from prep.inspect.samples import CAPTION_CHARS, ChosenSamples, ShownSample, ShowOptions
from prep.left_out import as_reason

PICTURE_BYTES = 12 << 10
"""The most bytes of a thumbnail, and of the mask over it, before base64 adds a third."""
SAMPLE_BYTES = 48 << 10
"""The most that a sample adds to a page: thumbnail, mask, boxes, texts."""
REST_BYTES = 4 << 20
"""The most that everything else takes: charts, tables, lists."""
_QUALITIES = (75, 50, 25, 10)
_NAME_CHARS = 120
MAX_ROWS = 2000
"""Classes that the page lists by name; the largest ones."""
MAX_COLUMNS = 200
"""Columns of a chart; more classes or shards share them."""
KNOWN_BAD = "samples that a quarantine lists"
"""The words for a kind of finding that `KINDS` does not have."""
MAX_LISTED = 100
"""Findings of one kind that are listed; all are counted."""
_NUM_BINS = 40
_SHORT_CHARS = 80


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
    shards: ShardSet, options: ShowOptions, *, known_bad: Sequence[Exclusion] = (), show_progress: bool = False
) -> Page:
    """Write a page of some shards; it has at most ``num * SAMPLE_BYTES + REST_BYTES`` bytes.

    ``known_bad`` are samples that a quarantine lists, with their causes; the page lists them, too.

    Raises:
        DataError: If there is no sample, key, class or component of this name, or the manifest, an index or a shard
            cannot be read.
    """
    chosen = ChosenSamples(shards, options, show_progress=show_progress)
    manifest = chosen.indexed.manifest
    info, columns, problems = _add_up(chosen.indexed, show_progress=show_progress)
    samples = chosen.read(side=TILE, with_texts=True)
    findings, counts = _all_findings(problems, samples, known_bad)
    body = [
        head_part(info, num_bad=sum(counts.values())),
        class_part(info),
        *photo_parts(info, columns.sizes),
        shard_part(manifest.names, manifest.shard_bytes),
        bad_part(findings, counts, max_listed=MAX_LISTED),
        samples_part(printable(chosen.about)),
        data_script("samples", _sample_data(samples, manifest, mask_colours(values_of_masks(samples)))),
    ]
    bad: Counter[str] = Counter()
    for (kind, _), number in counts.items():
        bad[kind] += number
    html = html_document(shards.url, body, styles=[own_file("view.css")], scripts=[own_file("view.js")])
    return Page(html=html, keys=[sample.key for sample in samples], num_matching=chosen.num_matching, bad=dict(bad))


class IndexProblems:
    """Counts what shard indexes show to be bad, and lists the first findings of each kind."""

    def __init__(self, indexed: IndexedSet) -> None:
        self._manifest, self._roles = indexed.manifest, indexed.roles
        self._usual = usual_components(self._manifest.components, self._manifest.num_samples)
        self.counts: Counter[tuple[str, str]] = Counter()
        """Kind of finding and reason, see `as_reason` -> number of findings."""
        self.listed: list[ShardFinding] = []

    def add(self, index: ShardIndex) -> None:
        has = {name: offsets >= 0 for name, offsets in index.offsets.items()}
        for finding in itertools.chain(
            refused_photos(index, PhotoRules()),
            wrong_mask_sizes(index, self._roles),
            missing_components(index.shard, index.keys, has, usual=self._usual, roles=self._roles),
            unknown_labels(index, self._manifest.classes),
        ):
            kind = finding.kind
            if sum(number for (of, _), number in self.counts.items() if of == kind) < MAX_LISTED:
                self.listed.append(finding)
            self.counts[kind, as_reason(finding.text)] += 1


def _add_up(indexed: IndexedSet, *, show_progress: bool) -> tuple[SetInfo, IndexColumns, IndexProblems]:
    info, columns = SetInfo.of(indexed), IndexColumns()
    problems = IndexProblems(indexed)
    with bar(what="indexes", total=info.num_shards, unit="shards", shown=show_progress, delay_s=1) as drawn:
        for row, index in indexed.each():
            columns.add(row, index)
            problems.add(index)
            drawn.update(1)
    columns.fill(info, indexed.roles)
    return info, columns, problems


def _all_findings(
    problems: IndexProblems, samples: Sequence[ShownSample], known_bad: Sequence[Exclusion]
) -> tuple[list[tuple[ShardFinding, str]], Counter[tuple[str, str]]]:
    """Each finding with its origin, and how many there are by kind and reason; a photo found twice counts once."""
    found = [(finding, "index") for finding in problems.listed]
    counts = Counter(problems.counts)
    for finding in (problem for sample in samples for problem in sample.problems):
        if finding[:4] not in {one[:4] for one in problems.listed}:
            counts["photo", as_reason(finding.text)] += 1
            found.append((finding, "pixels"))
    for number, one in enumerate(known_bad):
        text = one.cause or "is listed without a cause"
        counts["quarantine", as_reason(text)] += 1
        if number < MAX_LISTED:
            found.append((ShardFinding("quarantine", one.shard or "", one.key, one.component, text), one.where))
    return found, counts


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


# Parts of the page


def head_part(info: SetInfo, *, num_bad: int) -> str:
    """The title, and the set in one line."""
    counts = f"{info.num_samples:,} samples, {info.num_shards:,} shards, {format_bytes(info.num_bytes)}"
    bad = f'<a href="#bad">{num_bad:,} bad or missing</a>' if num_bad else "nothing bad was found"
    rows = [["component", "samples", "bytes"]]
    rows += [
        [name, f"{number:,}", format_bytes(info.component_bytes.get(name, 0))]
        for name, number in list(info.components.items())[:MAX_COLUMNS]
    ]
    more = (
        f" The first {MAX_COLUMNS} of {len(info.components):,} are shown." if len(rows) <= len(info.components) else ""
    )
    not_indexed = "" if info.is_indexed else " The shards have no index: they were read once for this page."
    return (
        f'<h1>{text(info.url)}</h1><p class="soft">{counts}; {bad}.{not_indexed}</p>'
        f"<h2>Components</h2>{html_table(rows)}<p class=soft>{more}</p>"
    )


def class_part(info: SetInfo) -> str:
    """How many samples each class has: a chart from the largest to the smallest, and a list that filters samples."""
    if not info.class_counts:
        return '<h2>Classes</h2><p class="soft">No sample has a label.</p>'
    ordered = sorted(info.class_counts.items(), key=lambda item: (-item[1], item[0]))
    counts = np.array([number for _, number in ordered], np.int64)
    most = max(1, int(counts[0]))
    empty = int((counts == 0).sum())
    words = f"{len(ordered):,} classes, {counts[-1]:,} to {counts[0]:,} samples, median {int(np.median(counts)):,}"
    if empty:
        words += f"; {empty:,} without a sample"
    lines = []
    for label, number in ordered[:MAX_ROWS]:
        name = text(info.classes.get(label, label), max_chars=_SHORT_CHARS)
        share = 100 * number / most
        lines.append(
            f'<tr><td class="name"><button type="button" class="class" data-class="{label}">{name}</button></td>'
            f'<td class="name">{label}</td><td>{number:,}</td><td class="name"><svg class="meter" viewBox="0 0 100 10" '
            f'preserveAspectRatio="none"><rect class="bar" width="{share:.1f}" height="10"/></svg></td></tr>'
        )
    listed = "" if len(ordered) <= MAX_ROWS else f" The {MAX_ROWS:,} largest are listed."
    values, names = _grouped(counts, [str(info.classes.get(label, label)) for label, _ in ordered], unit="samples")
    chart = columns(values, titles=names, ticks=[], label="Samples of each class, from the largest to the smallest")
    return (
        f'<h2>Classes</h2><p class="soft">{words}.{listed} Click a class to see only its samples below.</p>'
        f'<div class="charts">{figure("Samples of each class, largest first", chart)}'
        '<div class="wide tall" tabindex="0"><table class="sortable" id="classes"><thead><tr><th class="name">class'
        '</th><th class="name">id</th><th>samples</th><th></th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></div>"
    )


def photo_parts(info: SetInfo, sizes: Mapping[str, Int64s]) -> list[str]:
    """Sizes, aspects and formats of each photo component; of masks the formats only."""
    formats = [["component", "format", "photos", "of all"]]
    for component, photo in info.photos.items():
        formats += [
            [component, name, f"{number:,}", f"{number / photo.num_photos:.1%}"]
            for name, number in sorted(photo.formats.items(), key=lambda item: -item[1])
        ]
    parts = ["<h2>Formats</h2>", html_table(formats, num_names=2)] if len(formats) > 1 else []
    for component, photo in info.photos.items():
        if not photo.is_mask:
            parts.append(_sizes_part(component, photo, sizes[component]))
    return parts


def shard_part(names: Sequence[str], num_bytes: Int64s) -> str:
    """Bytes of each shard, in their order."""
    values, titles = _grouped(num_bytes, names, unit="bytes")
    scale = 1 << 20 if int(num_bytes.max()) >= 1 << 20 else 1 << 10
    unit = "MiB" if scale == 1 << 20 else "KiB"
    chart = columns(
        [value / scale for value in values], titles=titles, ticks=[(0, "first shard"), (len(values), "last")],
        label=f"{unit} of each shard",
    )  # fmt: skip
    words = f"{len(names):,} shards, {format_bytes(int(num_bytes.min()))} to {format_bytes(int(num_bytes.max()))}"
    return f'<h2>Shards</h2><div class="charts">{figure(f"{unit} by shard", chart, about=words)}</div>'


def bad_part(findings: Sequence[tuple[ShardFinding, str]], counts: Counter[tuple[str, str]], *, max_listed: int) -> str:
    """What is bad, why, and by what it was found."""
    begin = (
        '<h2 id="bad">What is bad, and why</h2><p class="soft">Found by the shard indexes of all samples, and by '
        "decoding those that are shown below. To decode every sample: dali-pipes prep verify URL --quarantine bad.tsv; "
        "then show its list here: --quarantine bad.tsv.</p>"
    )
    if not counts:
        return f"{begin}<p>Nothing bad was found.</p>"
    reasons = [["findings", "kind", "reason"]]
    for (kind, reason), number in counts.most_common(MAX_COLUMNS):
        reasons.append([f"{number:,}", KINDS.get(kind, KNOWN_BAD), reason])
    rows = [["key", "shard", "component", "why", "found by"]]
    for finding, origin in findings:
        cells = (finding.key, finding.shard, finding.component)
        rows.append([*(_shorter(cell) for cell in cells), f"{finding.text}", origin])
    is_cut = len(rows) <= sum(counts.values())
    limit = f'<p class="soft">At most {max_listed} of a kind are listed.</p>' if is_cut else ""
    summary = f'<div id="reasons">{html_table(reasons, num_names=3)}</div>'
    return f'{begin}{summary}{limit}<div id="findings" class="tall">{html_table(rows, num_names=5)}</div>'


def samples_part(about: str) -> str:
    """The place of the samples, which a script fills, and the filters."""
    return (
        f'<h2>Samples</h2><p class="soft">{text(about)}</p>'
        '<form id="filters"><label>Key contains <input type="search" id="key" autocomplete="off"></label>'
        '<label>Class <select id="class"><option value="">all</option></select></label>'
        '<label><input type="checkbox" id="only-bad"> only bad</label>'
        '<label><input type="checkbox" id="with-mask" checked> mask</label>'
        '<label><input type="checkbox" id="with-boxes" checked> boxes</label>'
        '<output id="count"></output></form><div id="cards"></div>'
        "<noscript>The samples are drawn by a script of this page; your browser runs none.</noscript>"
    )


def _sizes_part(component: str, photo: PhotoInfo, sizes: Int64s) -> str:
    """Charts of bytes, heights and widths, int64 [photos, 3]."""
    sized = sizes[(sizes[:, 1] > 0) & (sizes[:, 2] > 0)]
    charts = []
    if len(sized) and photo.short_side is not None:
        heights, widths = sized[:, 1], sized[:, 2]
        charts.append(figure("Width and height, pixels", _sizes_chart(widths, heights), about="The darker, the more."))
        charts.append(figure("Shorter side, pixels", _distribution(photo.short_side, "shorter side, pixels")))
        charts.append(figure("Aspect: width to height", _aspects(widths, heights)))
    if photo.num_bytes is not None:
        charts.append(figure("Bytes of a photo", _distribution(photo.num_bytes, "bytes")))
    words = f"{photo.num_photos:,} photos"
    if len(sized) < photo.num_photos:
        words += f", {photo.num_photos - len(sized):,} of them without a readable size"
    return f'<h2>Sizes of {text(component)}</h2><p class="soft">{words}.</p><div class="charts">{"".join(charts)}</div>'


def _sizes_chart(widths: Int64s, heights: Int64s) -> str:
    """Photos by width and height, on logarithmic axes."""
    low = int(min(widths.min(), heights.min()))
    high = int(max(widths.max(), heights.max())) + 1
    edges = np.geomspace(low, max(high, 1.5 * low), _NUM_BINS + 1)
    counts, _, _ = np.histogram2d(widths, heights, bins=(edges, edges))
    ticks = [
        (float(np.interp(np.log(side), np.log(edges), np.arange(len(edges)))), str(side)) for side in _sides(edges)
    ]

    def title(column: int, row: int, count: int) -> str:
        wide, tall = (f"{np.ceil(edges[at]):.0f} to {np.ceil(edges[at + 1]) - 1:.0f}" for at in (column, row))
        return f"{count:,} photos: {wide} wide, {tall} high"

    return heat(counts.astype(np.int64), titles=title, x_ticks=ticks, y_ticks=ticks, label="Photos by width and height")


def _sides(edges: npt.NDArray[np.float64]) -> list[int]:
    """Round sides within the edges: powers of two, or if there are fewer than two, round numbers."""
    low, high = edges[0], edges[-1]
    powers = [1 << power for power in range(32) if low <= 1 << power <= high]
    if len(powers) >= 2:
        return powers[:: -(-len(powers) // 6)]
    return sorted({round(low), *(int(value) for value in round_ticks(float(high)) if value >= low)})


def _aspects(widths: Int64s, heights: Int64s) -> str:
    """Photos by aspect in steps of an eighth of an octave, from 1:4 to 4:1; others count at the ends."""
    octaves = np.clip(np.log2(widths / heights), -1.999, 1.999)
    edges = np.linspace(-2, 2, 33)
    # A square is in the middle of its step, not between two.
    counts, _ = np.histogram(octaves, edges - 1 / 16)
    counts[-1] += int((octaves >= edges[-1] - 1 / 16).sum())
    titles = []
    for number, count in enumerate(counts.tolist()):
        low, high = 2 ** (edges[number] - 1 / 16), 2 ** (edges[number + 1] - 1 / 16)
        titles.append(f"{count:,} photos: width / height {low:.2f} to {high:.2f}")
    ticks = [(0.5, "1:4"), (8.5, "1:2"), (16.5, "1:1"), (24.5, "2:1"), (31.9, "4:1")]
    return columns(counts.tolist(), titles=titles, ticks=ticks, label="Photos by width to height")


def _distribution(found: Distribution, unit: str) -> str:
    titles = [
        f"{count:,} photos: {low:,} to {high - 1:,} {unit}"
        for count, low, high in zip(found.counts, found.edges, found.edges[1:], strict=False)
    ]
    step = -(-len(found.edges) // 6)
    ticks = [(float(place), short(edge)) for place, edge in enumerate(found.edges)][::step]
    label = f"Photos by {unit}: median {found.median:,}"
    return columns(found.counts, titles=titles, ticks=ticks, label=label)


def _grouped(values: Int64s, names: Sequence[str], *, unit: str) -> tuple[list[float], list[str]]:
    """At most `MAX_COLUMNS` heights and their texts: of many values, neighbours share a column with their mean."""
    size = -(-len(values) // MAX_COLUMNS)
    heights, texts = [], []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        heights.append(float(part.mean()))
        if size == 1:
            texts.append(f"{_shorter(names[start])}: {int(part[0]):,} {unit}")
        else:
            ends = f"{_shorter(names[start])} to {_shorter(names[start + len(part) - 1])}"
            texts.append(f"{ends}: {int(part.min()):,} to {int(part.max()):,} {unit}, mean {part.mean():,.0f}")
    return heights, texts


def _shorter(name: str) -> str:
    return name if len(name) <= _SHORT_CHARS else f"{name[:_SHORT_CHARS]}..."
