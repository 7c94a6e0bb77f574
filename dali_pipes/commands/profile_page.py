"""Write a profile as a page: a timeline of the stages of each epoch, its stalls with their causes, and the sums."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dali_pipes.commands.timeline import NUM_BINS, STALL_LEAST_S, STALL_TIMES, Stall, Timeline
from dali_pipes.pages.charts import round_ticks
from dali_pipes.pages.page import data_script, definition_list, html_document, html_table, own_file, text

if TYPE_CHECKING:
    from dali_pipes.commands.epoch_profile import EpochProfile
    from dali_pipes.commands.profile import Diagnosis
    from dali_pipes.commands.timeline import Row

MAX_EPOCHS = 10
"""Epochs that are drawn: the first ones. The sums of all stand in a table."""
MAX_STALLS = 100
"""Stalls of an epoch that are marked and listed: the longest ones."""
_HEIGHT = 100
_ABOUT = {
    "step": "what your training does between two batches; it waits for the loader",
    "hand-over": "in the thread that iterates: schedules batches and hands them over; waits for decoded batches",
    "inputs": "in the thread that iterates: arrays and parsed components",
    "read": "in the thread that iterates: plan and segments; waits for encoded bytes and for shards",
    "decode": "DALI's threads, on a core: decodes and transforms",
    "stage": "the fetching threads: free space, checksums, the cache's table",
    "fetch": "the fetching threads: bytes from the store",
}


def profile_page(
    url: str,
    timelines: Sequence[Timeline],
    profiles: "Sequence[EpochProfile]",
    diagnoses: "Sequence[Diagnosis]",
    *,
    settings: Sequence[tuple[str, str]],
) -> str:
    """Return the page.

    Args:
        url: The shards.
        timelines: Of each epoch.
        profiles: The sums of each epoch.
        diagnoses: The bottleneck of each epoch.
        settings: Names and values of what the run used.
    """
    body = [
        f"<h1>Profile of {text(url)}</h1>",
        '<p class="soft">What each stage of the loader did when. <span class="key busy"></span> works, '
        '<span class="key waits"></span> waits, <span class="key stall"></span> a stall: the loop waited for a batch '
        f"more than {STALL_TIMES:g} times as long as in the median, and more than {1000 * STALL_LEAST_S:g} ms. The "
        "higher a row, the more of its threads are busy. Move a pointer over a timeline to read it.</p>",
    ]
    for number, (timeline, profile, found) in enumerate(zip(timelines, profiles, diagnoses, strict=True)):
        if number < MAX_EPOCHS:
            body += _epoch_part(number, timeline, profile, found)
    if len(timelines) > MAX_EPOCHS:
        body.append(f"<p>The first {MAX_EPOCHS} of {len(timelines)} epochs are drawn.</p>")
    body += ["<h2>Sums</h2>", _sums(profiles), "<h2>The stages</h2>", definition_list(list(_ABOUT.items()))]
    body += ["<h2>Measured with</h2>", definition_list(settings)]
    body.append(data_script("timelines", [_data(timeline) for timeline in timelines[:MAX_EPOCHS]]))
    own = [own_file("dali_pipes.commands", f"profile_page.{kind}") for kind in ("css", "js")]
    return html_document(f"Profile of {url}", body, styles=own[:1], scripts=own[1:])


def _epoch_part(number: int, timeline: Timeline, profile: "EpochProfile", found: "Diagnosis") -> list[str]:
    waited = profile.of("step").waiting_s
    speed = timeline.num_samples / timeline.wall_s
    longest = sorted(timeline.stalls, key=lambda stall: -stall.waited_s)[:MAX_STALLS]
    shown = sorted(longest, key=lambda stall: stall.at_s)
    stalled = sum(stall.waited_s for stall in timeline.stalls)
    words = (
        f"{timeline.num_samples:,} samples in {timeline.wall_s:.2f} s, {speed:,.0f} samples/s; the step waits for "
        f"{waited:.2f} s of it, in stalls {stalled:.2f} s; median wait {1000 * timeline.median_wait_s:.1f} ms."
    )
    advice = "".join(f"<li>{text(one, max_chars=600)}</li>" for one in found.turn)
    parts = [
        f"<h2>Epoch {timeline.epoch}</h2><p>{text(words)}</p>",
        f"<p><strong>Bottleneck: {text(found.bottleneck)}</strong>: {text(found.why, max_chars=600)}.</p>"
        f"<ul>{advice}</ul>",
        _drawing(number, timeline, shown),
    ]
    if timeline.is_cut:
        parts.append("<p>The run was too long to keep every range of a stage: rows are empty from some time on.</p>")
    if not shown:
        return [*parts, "<h3>Stalls</h3><p>None.</p>"]
    rows = [["at s", "waited ms", "batch", "waits for", "cause"]]
    rows += [
        [f"{stall.at_s:.3f}", f"{1000 * stall.waited_s:.1f}", str(stall.step), stall.stage, stall.cause]
        for stall in shown
    ]
    more = f" The longest {MAX_STALLS} are listed." if len(timeline.stalls) > MAX_STALLS else ""
    title = f'<h3>Stalls</h3><p class="soft">{len(timeline.stalls)} of {profile.num_batches} waits.{more}</p>'
    return [*parts, f'{title}<div class="stalls">{html_table(rows, num_names=0)}</div>']


def _drawing(number: int, timeline: Timeline, stalls: Sequence[Stall]) -> str:
    rows = [_row(row, timeline, stalls if row.stage == "step" else ()) for row in timeline.rows]
    ticks = "".join(
        f'<span style="left:{100 * second / timeline.wall_s:.3f}%">{second:g}</span>'
        for second in round_ticks(timeline.wall_s, 8)
    )
    return (
        f'<div class="timeline" data-number="{number}">{"".join(rows)}'
        f'<div class="row axis"><div class="stage soft">seconds</div><div class="track ticks soft">{ticks}</div></div>'
        '<div class="cursor" hidden></div></div><output class="readout soft">&nbsp;</output>'
    )


def _row(row: "Row", timeline: Timeline, stalls: Sequence[Stall]) -> str:
    marks = []
    for stall in stalls:
        left, width = (NUM_BINS * seconds / timeline.wall_s for seconds in (stall.at_s, stall.waited_s))
        title = f"batch {stall.step}, at {stall.at_s:.3f} s, waits for {stall.stage}: {stall.cause}"
        marks.append(
            f'<rect class="stall" x="{left:.2f}" y="0" width="{max(width, 1.5):.2f}" height="{_HEIGHT}">'
            f"<title>{text(title, max_chars=600)}</title></rect>"
        )
    threads = f" <small>x {row.threads}</small>" if row.threads > 1 else ""
    busy = np.clip(row.busy, 0, 1)
    drawing = (
        f'<svg role="img" aria-label="{text(row.stage)} over time" viewBox="0 0 {NUM_BINS} {_HEIGHT}" '
        f'preserveAspectRatio="none"><path class="waits" d="{_area(np.clip(busy + row.waits, 0, 1))}"/>'
        f'<path class="busy" d="{_area(busy)}"/>{"".join(marks)}</svg>'
    )
    about = text(_ABOUT[row.stage])
    name = f'<div class="stage" title="{about}">{text(row.stage)}{threads}</div>'
    return f'<div class="row">{name}<div class="track">{drawing}</div></div>'


def _area(shares: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> str:
    """A path of steps, one for each interval, above the row's lower edge; equal neighbours are one step."""
    heights = np.rint(_HEIGHT * (1 - shares)).astype(int).tolist()
    parts = [f"M0 {_HEIGHT}V{heights[0]}"]
    for place, (before, here) in enumerate(itertools.pairwise(heights), start=1):
        if here != before:
            parts.append(f"H{place}V{here}")
    return "".join([*parts, f"H{len(heights)}V{_HEIGHT}Z"])


def _data(timeline: Timeline) -> dict[str, object]:
    """What the pointer's text shows: percents of each interval."""

    def percents(shares: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> list[int]:
        found: list[int] = np.rint(100 * np.clip(shares, 0, 1)).astype(int).tolist()
        return found

    return {
        "seconds": timeline.wall_s,
        "rows": [
            {"stage": row.stage, "threads": row.threads, "busy": percents(row.busy), "waits": percents(row.waits)}
            for row in timeline.rows
        ],
    }


def _sums(profiles: "Sequence[EpochProfile]") -> str:
    rows = [["epoch", "stage", "threads", "busy s", "waiting s", "busy"]]
    for profile in profiles:
        for times in profile.stages:
            capacity = times.threads * profile.wall_s
            busy = f"{times.busy_s / capacity:.0%}" if capacity else "-"
            figures = (str(times.threads), f"{times.busy_s:.2f}", f"{times.waiting_s:.2f}", busy)
            rows.append([str(profile.epoch), times.stage, *figures])
    return html_table(rows, num_names=2)
