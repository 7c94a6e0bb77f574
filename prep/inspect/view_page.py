"""Write a page of a data set: its figures, some of its samples, and what is bad. It needs no network and no other file.

The figures of the whole set come from manifest and shard indexes; of the shards only the samples that are shown are
read. The page's size is bounded, see `SAMPLE_BYTES` and `REST_BYTES`.

Texts of data, servers and files reach a page in two ways only: through `_text`, which makes them printable and escapes
them, and through `_data_script`, which writes JSON that no HTML parser can leave; the page's script shows such data as
text, never as HTML. Beside that a page says by its Content-Security-Policy that only its own script runs, named by its
SHA-256, and that nothing is loaded, so that a mistake here would show a tag but run nothing.
"""

import base64
import hashlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
from PIL import Image

from dali_pipes.commands.options import format_bytes
from dali_pipes.errors import printable
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.photo_header import PhotoRules
from dali_pipes.formats.quarantine import Exclusion
from dali_pipes.formats.shard_index import ShardIndex
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.contact_sheet import MASK_COLOURS, OPACITY, TILE, Pixels
from prep.inspect.findings import (
    KINDS,
    ShardFinding,
    missing_components,
    refused_photos,
    unknown_labels,
    usual_components,
    wrong_mask_sizes,
)
from prep.inspect.indexed_set import IndexedSet
from prep.inspect.info import Photos, SetInfo, sum_up
from prep.inspect.samples import CAPTION_CHARS, ChosenSamples, ShownSample, ShowOptions
from prep.left_out import as_reason

PICTURE_BYTES = 12 << 10
"""The most bytes of a thumbnail, and of the mask over it, before base64 adds a third."""
SAMPLE_BYTES = 48 << 10
"""The most that a sample adds to a page: thumbnail, mask, boxes, texts."""
REST_BYTES = 4 << 20
"""The most that everything else takes: tables and lists."""
MAX_ROWS = 2000
"""Classes that the page lists by name; the largest ones."""
MAX_LISTED = 100
"""Findings of one kind that are listed; all are counted."""
_MAX_NAMES = 200  # components, and reasons, that a table lists
_TEXT_CHARS = 300  # of one text of the data
_NAME_CHARS = 120
_SHORT_CHARS = 80
_ASPECTS = (0, 0.5, 0.67, 0.9, 1.1, 1.5, 2)  # width to height, from each to the next


@dataclass(kw_only=True)
class Page:
    """A page and its contents."""

    html: str
    keys: list[str]
    num_matching: int
    bad: dict[str, int]
    """Kind of finding, see `prep.inspect.findings.KINDS`, or ``quarantine`` -> number of findings."""


def view_page(
    shards: ShardSet, options: ShowOptions, *, known_bad: Sequence[Exclusion] = (), show_progress: bool = False
) -> Page:
    """Write a page of some shards; it has at most ``num * SAMPLE_BYTES + REST_BYTES`` bytes.

    ``known_bad`` are samples that a quarantine lists, with their causes; the page lists them, too, each once. For
    errors see `ChosenSamples`.
    """
    chosen = ChosenSamples(shards, options, show_progress=show_progress)
    samples = chosen.read(side=TILE)
    findings = _Findings(chosen.indexed, samples)
    info, photos = sum_up(chosen.indexed, findings.add_index, show_progress=show_progress)
    findings.add_known(known_bad)
    body = [
        _head_part(info, num_bad=findings.reasons.total()),
        _data_script("samples", _sample_data(samples, chosen.indexed.manifest)),
        f'<h2>Samples</h2><p class="soft">{_text(chosen.about)}</p>',
        files("prep.inspect").joinpath("page_samples.html").read_text("utf-8"),
        _component_part(info),
        _class_part(info),
        *_photo_parts(info, photos),
        _bad_part(findings),
    ]
    keys, bad = [sample.key for sample in samples], dict(findings.kinds)
    return Page(html=html_document(shards.url, body), keys=keys, num_matching=chosen.num_matching, bad=bad)


class _Findings:
    """Counts what is bad, and lists the first findings of each kind; a photo that is found twice counts once."""

    def __init__(self, indexed: IndexedSet, samples: Sequence[ShownSample]) -> None:
        self._manifest, self._roles = indexed.manifest, indexed.roles
        self._usual = usual_components(self._manifest.components, self._manifest.num_samples)
        self._undecodable = {finding[2:] for sample in samples for finding in sample.problems}
        self._found: set[tuple[str, str]] = set()  # keys and components
        self.kinds: Counter[str] = Counter()
        self.reasons: Counter[tuple[str, str]] = Counter()
        """Kind of finding and reason, see `as_reason` -> number of findings."""
        self.listed: list[tuple[ShardFinding, str]] = []
        """Findings and what they were found by."""
        for finding in (finding for sample in samples for finding in sample.problems):
            self._add(finding, "pixels")

    def add_index(self, index: ShardIndex) -> None:
        has = {name: offsets >= 0 for name, offsets in index.offsets.items()}
        for finding in itertools.chain(
            refused_photos(index, PhotoRules()),
            wrong_mask_sizes(index, self._roles),
            missing_components(index.shard, index.keys, has, usual=self._usual, roles=self._roles),
            unknown_labels(index, self._manifest.classes),
        ):
            if finding.kind != "photo" or finding[2:] not in self._undecodable:
                self._add(finding, "index")

    def add_known(self, known_bad: Sequence[Exclusion]) -> None:
        for one in known_bad:
            if (one.key, one.component) in self._found:
                continue
            cause = one.cause or "is listed without a cause"
            self._add(ShardFinding("quarantine", cause, one.shard or "", one.key, one.component), one.where)

    def _add(self, finding: ShardFinding, origin: str) -> None:
        self._found.add((finding.key, finding.component))
        self.kinds[finding.kind] += 1
        self.reasons[finding.kind, as_reason(finding.text)] += 1
        if self.kinds[finding.kind] <= MAX_LISTED:
            self.listed.append((finding, origin))


# The samples, as JSON for the page's script


def _sample_data(samples: Sequence[ShownSample], manifest: Manifest) -> dict[str, Any]:
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
                "photo": "" if sample.photo is None else _photo(sample.photo),
                "mask": "" if sample.mask is None else _mask(sample.mask),
                "boxes": [[round(share, 4) for share in box] for box in sample.boxes],
                "caption": printable(sample.caption, max_chars=CAPTION_CHARS),
                "bad": "; ".join(_short(f"{problem.component} {problem.text}") for problem in sample.problems),
            }
            for sample in samples
        ],
    }


def _short(name: str) -> str:
    return printable(name, max_chars=_NAME_CHARS)


def _photo(photo: Pixels) -> str:
    """A photo as an address, in the best quality that is small enough."""
    for quality in (75, 50, 25, 10):
        data = _saved(Image.fromarray(photo), "JPEG", quality=quality)
        if len(data) <= PICTURE_BYTES:
            break
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


def _mask(mask: Pixels) -> str:
    """The mask's colours as an address, transparent where the value is 0; a mask of noise gets fewer pixels."""
    opacity = bytes([0, *[round(255 * OPACITY)] * 255])
    for step in (1, 2, 4):
        picture = Image.fromarray(np.ascontiguousarray(mask[::step, ::step]))
        picture.putpalette(MASK_COLOURS.tobytes())
        data = _saved(picture, "PNG", transparency=opacity, optimize=True)
        if len(data) <= PICTURE_BYTES:
            break
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


# Parts of the page


def _head_part(info: SetInfo, *, num_bad: int) -> str:
    """The title, and the set in one line."""
    counts = f"{info.num_samples:,} samples, {info.num_shards:,} shards, {format_bytes(info.num_bytes)}"
    bad = f'<a href="#bad">{num_bad:,} bad or missing</a>' if num_bad else "nothing bad was found"
    not_indexed = "" if info.is_indexed else " The shards have no index: they were read once for this page."
    return f'<h1>{_text(info.url)}</h1><p class="soft">{counts}; {bad}.{not_indexed}</p>'


def _component_part(info: SetInfo) -> str:
    rows = [["component", "samples", "bytes"]]
    for name, number in itertools.islice(info.components.items(), _MAX_NAMES):
        rows.append([name, f"{number:,}", format_bytes(info.component_bytes[name])])
    more = f'<p class="soft">The first {_MAX_NAMES} of {len(info.components):,} components are listed.</p>'
    return f"<h2>Components</h2>{more if len(info.components) > _MAX_NAMES else ''}{html_table(rows)}"


def _class_part(info: SetInfo) -> str:
    """How many samples each class has, the largest first; a click on a class filters the samples."""
    if not info.class_counts:
        return '<h2>Classes</h2><p class="soft">No sample has a label.</p>'
    ordered = sorted(info.class_counts.items(), key=lambda item: (-item[1], item[0]))
    numbers = [number for _, number in ordered]
    words = f"{len(ordered):,} classes, {numbers[-1]:,} to {numbers[0]:,} samples, median {int(np.median(numbers)):,}"
    if empty := numbers.count(0):
        words += f"; {empty:,} without a sample"
    rows = [["class", "id", "samples"]]
    for label, number in ordered[:MAX_ROWS]:
        rows.append([printable(info.classes.get(label, str(label)), max_chars=_SHORT_CHARS), str(label), f"{number:,}"])
    table = html_table(rows, num_names=2, shares=[number / max(1, numbers[0]) for number in numbers[:MAX_ROWS]])
    listed = "" if len(ordered) <= MAX_ROWS else f" The {MAX_ROWS:,} largest are listed."
    return (
        f'<h2>Classes</h2><p class="soft">{words}.{listed} Click a class to see only its samples above.</p>'
        f'<div id="classes" class="tall">{table}</div>'
    )


def _photo_parts(info: SetInfo, photos: dict[str, Photos]) -> list[str]:
    """Formats of each photo component; sizes and aspects of those that are no masks."""
    formats = [["component", "format", "photos", "of all"]]
    for component, photo in info.photos.items():
        for name, number in photo.formats.items():
            formats.append([component, name, f"{number:,}", f"{number / photo.num_photos:.1%}"])
    parts = ["<h2>Formats</h2>", html_table(formats, num_names=2)] if info.photos else []
    for component, photo in info.photos.items():
        if photo.is_mask:
            continue
        sizes = [["of each photo", "least", "5%", "median", "95%", "greatest"]]
        lengths = {"width": photo.width, "height": photo.height, "shorter side": photo.short_side}
        for what, found in (lengths | {"bytes": photo.num_bytes}).items():
            if found is not None:
                cuts = (found.least, found.percentile_5, found.median, found.percentile_95, found.greatest)
                sizes.append([what, *(f"{cut:,}" for cut in cuts)])
        parts += [f"<h2>Sizes of {_text(component)}</h2>", html_table(sizes)]
        if photo.short_side is not None:
            bins = itertools.pairwise(photo.short_side.edges)
            parts.append(_bars("shorter side", [f"{low} to {high - 1}" for low, high in bins], photo.short_side.counts))
            rows = photos[component]
            rows = rows[(rows["height"] > 0) & (rows["width"] > 0)]
            counts = np.histogram(rows["width"] / rows["height"], [*_ASPECTS, np.inf])[0].tolist()
            names = [f"{low} to {high}" for low, high in itertools.pairwise(_ASPECTS)]
            parts.append(_bars("width / height", [*names, f"{_ASPECTS[-1]} or more"], counts))
    return parts


def _bars(what: str, names: Sequence[str], counts: Sequence[int]) -> str:
    rows = [[what, "photos"], *([name, f"{count:,}"] for name, count in zip(names, counts, strict=True))]
    return html_table(rows, shares=[count / max(1, *counts) for count in counts])


def _bad_part(findings: _Findings) -> str:
    """Write the list of bad samples: the reason, and the check that found it."""
    begin = (
        '<h2 id="bad">What is bad, and why</h2><p class="soft">Found by the shard indexes of all samples, and by '
        "decoding those that are shown above. To decode every sample: dali-pipes prep verify URL --quarantine bad.tsv; "
        "then show its list here: --quarantine bad.tsv.</p>"
    )
    if not findings.reasons:
        return f"{begin}<p>Nothing bad was found.</p>"
    reasons = [["findings", "kind", "reason"]]
    for (kind, reason), number in findings.reasons.most_common(_MAX_NAMES):
        reasons.append([f"{number:,}", KINDS.get(kind, "samples that a quarantine lists"), reason])
    rows = [["key", "shard", "component", "why", "found by"]]
    for finding, origin in findings.listed:
        names = (printable(name, max_chars=_SHORT_CHARS) for name in (finding.key, finding.shard, finding.component))
        rows.append([*names, finding.text, origin])
    is_cut = len(findings.listed) < findings.reasons.total()
    limit = f'<p class="soft">At most {MAX_LISTED} of a kind are listed.</p>' if is_cut else ""
    summary = f'<div id="reasons">{html_table(reasons, num_names=3)}</div>'
    return f'{begin}{summary}{limit}<div id="findings" class="tall">{html_table(rows, num_names=5)}</div>'


# HTML


def html_document(title: str, body: Sequence[str]) -> str:
    """A whole page of a title, as plain text, and parts of HTML, in their order."""
    folder = files("prep.inspect")
    template, style, script = (folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    )
    return Template(template).substitute(
        title=_text(title), body="\n".join(body), policy=policy, style=style, script=script
    )


def _text(value: str) -> str:
    """A text as HTML shows it: printable, of bounded length, escaped, also for attributes in double quotes.

    >>> _text('<b title="x">' + chr(27))
    '&lt;b title=&quot;x&quot;&gt;\\\\x1b'
    """
    return escape(printable(value, max_chars=_TEXT_CHARS))


def _data_script(identifier: str, data: Any) -> str:
    """A script element that holds ``data`` as JSON, for `JSON.parse` of its text; it is never run.

    >>> _data_script("d", ["</script>"])
    '<script type="application/json" id="d">["\\\\u003c/script\\\\u003e"]</script>'
    """
    found = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        found = found.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{identifier}">{found}</script>'


def html_table(rows: Sequence[Sequence[str]], *, num_names: int = 1, shares: Sequence[float] = ()) -> str:
    """A table in a box of its own that scrolls if it is wider than the page; a click on a title sorts it.

    Args:
        rows: Cells as plain text, the header first.
        num_names: Columns from the left that are names, and are aligned to the left.
        shares: For each row but the header, the length of its bar in [0, 1]; empty: no bars.
    """

    def cells(row: Sequence[str], tag: str) -> str:
        marks = [' class="name"' if column < num_names else "" for column in range(len(row))]
        return "".join(f"<{tag}{mark}>{_text(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))

    bars = [
        '<td><svg class="meter" viewBox="0 0 100 10" preserveAspectRatio="none">'
        f'<rect class="bar" width="{100 * share:.1f}" height="10"/></svg></td>'
        for share in shares
    ]
    bars = bars or [""] * (len(rows) - 1)
    lines = [f"<tr>{cells(row, 'td')}{bar}</tr>" for row, bar in zip(rows[1:], bars, strict=True)]
    head = f"{cells(rows[0], 'th')}{'<th></th>' if shares else ''}"
    return (
        f'<div class="wide" tabindex="0"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
