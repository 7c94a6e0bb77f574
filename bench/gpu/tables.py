"""Write the records of `bench gpu` as tables, text for a terminal and Markdown for a report."""

from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

from bench.reports.figures import FIGURES as RUN_FIGURES
from bench.reports.figures import Figure
from bench.reports.tables import format_rows, spread_cell

FIGURES: Mapping[str, Figure] = {
    "samples_per_s": RUN_FIGURES["samples_per_s"],
    "cpu_ms_per_sample": RUN_FIGURES["cpu_ms_per_sample"],
    "cpu_share": Figure(
        title="CPU", unit="%", better="low", digits=0, scale=100, about="CPU time over the time of all cores."
    ),
}

_HEADER = [
    "variant", "setting", "samples/s", "CPU-ms/sample", "CPU", "GPU", "JPEG", "engines/hybrid/CPU", "step",
    "to GPU KiB/sample",
]  # fmt: skip


def format_scenario(report: Mapping[str, Any]) -> str:
    """Format one scenario as text: its table with notes on failed and omitted points, or its check's result."""
    if "check" in report:
        return _format_check(report)
    rows = [_row(record) for record in report["records"] if "samples_per_s" in record]
    table = format_rows([_HEADER, *rows]) if rows else f"{report['scenario']}: nothing was timed"
    return "\n".join([table, *_notes(report)])


def format_markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    """Format all scenarios of a run, each under a heading, and describe the machine."""
    parts = ["# GPU decoding", "", *_machine(reports)]
    for report in reports:
        parts += ["", f"## {report['scenario']}", ""]
        if "check" in report:
            parts.append(_format_check(report))
            continue
        if rows := [_row(record) for record in report["records"] if "samples_per_s" in record]:
            parts.append(format_rows([_HEADER, *rows], markdown=True, left=2))
        parts += [f"\n{note}" for note in _notes(report)]
    return "\n".join(parts) + "\n"


def _machine(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    if not reports:
        return ["Nothing was run."]
    environment = reports[0]["environment"]
    changed = " and changes" if environment["is_dirty"] else ""
    versions = environment["versions"].items()
    dali = next((version for name, version in versions if name.startswith("nvidia-dali")), "unknown")
    cpu, gpu = environment["cpu"], reports[0].get("gpu")
    lines = [
        f"{environment['date']}, commit {environment['commit']}{changed}, {cpu['model']}, "
        f"{cpu['cores_available']} cores, DALI {dali}."
    ]
    if gpu is None:
        lines.append("Decoded on the CPU: nothing here says anything about a GPU.")
    else:
        engines = gpu["jpeg_engines_nvjpeg"] or gpu.get("jpeg_engines_nvml")
        lines.append(f"{gpu['name']}, driver {gpu.get('driver', 'unknown')}, {engines or 'unknown'} JPEG engines.")
        if not gpu.get("video_library", True):
            lines.append("libnvcuvid is missing: the JPEG engines were not used (driver capability `video`).")
    photos = reports[0]["options"]["photos"]
    kind = "drawn, not photographs" if photos["drawn"] else "as stored in the shards"
    lines.append(
        f"{photos['num_photos']} photos, {kind}: {photos['encoded_bytes_mean'] / 1024:.1f} KiB and "
        f"{photos['pixels_mean'] / 1e6:.2f} megapixels on average."
    )
    return lines


def _row(record: Mapping[str, Any]) -> list[str]:
    used = (record["utilisation"] or {}).get("means", {})
    copied = record.get("copied_bytes_per_sample")
    if copied is not None:
        crossed = f"{sum(copied.values()) / 1024:.1f} measured"
    elif record["setting"]["device"] == "gpu" and record["host_bytes_per_sample"] is not None:
        crossed = f"{record['host_bytes_per_sample'] / 1024:.1f} at least"
    else:
        crossed = "-"
    return [
        record["variant"],
        record["label"],
        spread_cell(record, "samples_per_s", FIGURES),
        f"{record['cpu_ms_per_sample']:.3f}",
        f"{record['cpu_share']:.0%}",
        f"{used['gpu']:.0f}%" if "gpu" in used else "-",
        f"{used['jpeg']:.0f}%" if "jpeg" in used else "-",
        _decoders(record["decoded_by"]),
        "-" if record["step_share"] is None else f"{record['step_share']:.0%}",
        crossed,
    ]


def _decoders(found: Mapping[str, Any]) -> str:
    """Percent of the photos by engines, hybrid decoder and CPU; ``-`` without photos, ``?`` if the log was unclear."""
    if not found["num_photos"]:
        return "-"
    if found["unknown"] or found["failed"]:
        return "?"
    return "/".join(f"{100 * found[name] / found['num_photos']:.0f}" for name in ("engines", "hybrid", "cpu"))


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes = [
        f"failed: {record['variant']}, {record['label']}: {record['error']}"
        for record in report["records"]
        if "error" in record
    ]
    return notes + _left_out(report)


def _left_out(report: Mapping[str, Any]) -> list[str]:
    return [f"left out, the time was over: {'; '.join(report['left_out'])}"] if report["left_out"] else []


def _format_check(report: Mapping[str, Any]) -> str:
    return "\n".join([_check_text(report["scenario"], report["check"]), *_left_out(report)])


def _check_text(scenario: str, check: Mapping[str, Any]) -> str:
    if "error" in check:
        return f"{scenario}: FAILED on {check['device']}: {check['error']}"
    if scenario == "path":
        graphs = {name: found for name, found in check.items() if name != "device"}
        each = ", ".join(f"{name} {found['num_samples']} samples" for name, found in graphs.items())
        return f"path: each key once, on {check['device']}, finite: {each}"
    if not check["measured"]:
        return f"parity: not measured: {check['reason']}"
    rows = [["decoder", "equal", "mean", "99 %", "99.99 %", "max"]]
    for name, found in check["differences"].items():
        levels = (found["quantiles"]["0.99"], found["quantiles"]["0.9999"], found["max"])
        rows.append([name, f"{found['equal_share']:.2%}", f"{found['mean']:.3f}", *map(str, levels)])
    outputs = [["output", "equal", "mean", "max"]]
    for name, found in check["graphs"].items():
        outputs.append([name, f"{found['equal_share']:.2%}", f"{found['mean']:.4g}", f"{found['max']:.4g}"])
    of_decoders, of_graphs = (indent(format_rows(table), " " * 4) for table in (rows, outputs))
    return (
        f"parity with the CPU's pixels, grey levels, {check['num_photos']} photos:\n\n{of_decoders}\n\n"
        f"and of whole graphs, each output in its own unit:\n\n{of_graphs}"
    )
