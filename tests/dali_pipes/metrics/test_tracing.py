"""Spans of OpenTelemetry where a program uses it; nothing of it is imported otherwise."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import dali_pipes as dp
from dali_pipes.metrics import counts as counts_module
from dali_pipes.metrics.counts import Counts, report_span
from tests.dali_pipes.raw import raw


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == f"dali_pipes.{name}"]


def test_a_loader_reports_its_opening_its_shards_and_its_epochs(
    small_shards: Path, tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    started = time.time_ns()
    cache = dp.Cache(directory=tmp_path, show_progress=False)
    with (
        trace.use_span(trace.get_tracer("job").start_span("training")) as training,
        dp.loader(small_shards, raw, batch_size=4, device="cpu", cache=cache) as loader,
    ):
        for _ in range(2):
            sum(1 for _ in loader)
    (opening,) = named(exporter, "open")
    epochs, staged = named(exporter, "epoch"), named(exporter, "stage")
    assert [span.attributes["dali_pipes.epoch"] for span in epochs if span.attributes] == [0, 1]
    assert {span.parent.span_id for span in (opening, *epochs) if span.parent} == {training.get_span_context().span_id}
    assert sum(int(span.attributes["dali_pipes.num_shards"]) for span in staged if span.attributes) == 4  # type: ignore[arg-type]
    first = staged[0].attributes
    assert first is not None
    assert str(first["dali_pipes.first_shard"]).startswith(f"{small_shards}/s-")
    for span in exporter.get_finished_spans():
        assert span.start_time is not None
        assert span.end_time is not None
        assert started < span.start_time <= span.end_time <= time.time_ns()


def test_only_long_waits_are_spans(exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Counts().shard_wait
    with wait:
        pass
    assert not exporter.get_finished_spans()
    monkeypatch.setattr(counts_module, "_SPAN_S", 0.0)
    with wait:
        pass
    (span,) = named(exporter, "wait")
    assert span.attributes == {"dali_pipes.stage": "shards"}

    def broken(_: str) -> None:
        raise RuntimeError("no exporter")

    monkeypatch.setattr(trace, "get_tracer", broken)
    report_span("wait", seconds=2.0, stage="read")  # the exporter's error is not raised


def test_nothing_is_imported_that_a_program_does_not_use(small_shards: Path) -> None:
    """Neither OpenTelemetry nor Prometheus' client, trainers, their callbacks, nor packages of clouds."""
    program = (
        "import sys, dali_pipes as dp\n"
        "with dp.loader(sys.argv[1], dp.segmentation(crop=16), batch_size=8, device='cpu') as loader:\n"
        "    assert sum(1 for _ in loader) == 3 and loader.stats()['samples'] == 23\n"
        "unused = ['opentelemetry', 'prometheus_client', 'transformers', 'lightning']\n"
        "unused += ['obstore', 'boto3', 'dali_pipes.store.cloud.bucket']\n"
        "print([name for name in unused if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, small_shards], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
