"""Test ``bench gpu`` on the CPU, except for the parts that only a GPU has."""

import dataclasses
import functools
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import dali_pipes as dp
from bench.commands.gpu import gpu as gpu_command
from bench.engine.scenario import run_scenario
from bench.gpu.cases import CHECKS, SCENARIOS, STEP_SAMPLES_PER_S, GpuPoint, points_of
from bench.gpu.checks import GpuOutputError, check_parity, differences
from bench.gpu.devices import sampling
from bench.gpu.workload import GpuSetting, Workload, photo_header, read_photos
from dali_pipes.errors import DataError
from dali_pipes.store.shard_set import ShardSet
from tests.bench.gpu.conftest import planned
from tests.lazy import Lazy
from tests.shards import photo_bytes

torch = Lazy("torch")

ON_CPU = GpuSetting(device="cpu", num_threads=1, batch_size=4)
QUICK = ("--device", "cpu", "--batch-size", "4", "--num-threads", "1", "--seconds", "0.01", "--warm-up", "0")
"""Options of the command that make a run short."""


def run(name: str, workload: Workload, **change: Any) -> dict[str, Any]:
    return run_scenario(planned(name, workload, **change))


def bench_gpu(*arguments: str) -> Result:
    return CliRunner().invoke(gpu_command, arguments)


def points(name: str, device: str = "gpu", **sweeps: tuple[Any, ...]) -> list[GpuPoint]:
    return points_of(name, GpuSetting(device=device, num_threads=1, batch_size=64), sweeps)  # type: ignore[arg-type]


def test_points_change_one_thing_at_a_time() -> None:
    """The published recipe keeps its settings. The CPU omits it; a sweep does not change what a case fixes."""
    found = points("rn50", batch_size=(32, 64))
    assert (found[0].setting.batch_size, found[0].setting.hw_decoder_load) == (408, 0.12)
    assert found[4].setting == dataclasses.replace(found[2].setting, batch_size=32)
    assert [point.label for point in points("rn50", "cpu")] == ["base", "base"]
    shares = {point.setting.hw_decoder_load for point in points("roi", photo_side=(512,)) if point.case.change}
    assert shares == {1.0}


def test_a_point_that_fails_is_recorded_and_the_others_go_on(drawn: ShardSet, tmp_path: Path) -> None:
    """Nobody watches a session: if one setting runs out of memory, the others must still be timed."""
    without = Workload(drawn, photo="image.jpg", mask="mask.png", num_photos=10, directory=tmp_path, is_drawn=True)
    report = run("masks", without)
    assert report["records"] == []
    assert [row["loader"] for row in report["failed"]] == ["loader, masks cpu", "loader, masks mixed"]


def test_photos_are_encoded_again_and_the_first_shards_are_chosen(workload: Workload, monkeypatch: Any) -> None:
    again = workload.photos(dataclasses.replace(ON_CPU, photo_side=64, progressive_share=0.3))
    found = [(is_progressive, max(size)) for is_progressive, *size in map(photo_header, again.photos)]
    assert found == [(number in (3, 6, 9), 64) for number in range(10)]
    monkeypatch.setattr("bench.gpu.workload.LOADER_BYTES", 1)
    assert workload._first_shards.names == workload.shards.names[:1]
    with pytest.raises(DataError, match=r"no JPEG named 'trimap\.png'; name the component: --photo"):
        read_photos(workload.shards, photo="trimap.png", mask="", num=1)
    made: Any = SimpleNamespace(gpu={"name": "H100", "video_library": None})
    notes = planned("decode", workload)._conditions(made)
    assert " ".join(notes[1:]).startswith("H100, driver unknown. libnvcuvid is missing")


def test_an_error_that_broke_the_cuda_context_ends_the_process(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All later points would fail in it; another process goes on. Here a device that is not there says how it is."""
    scenario = planned("decode", workload, device="gpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert scenario.goes_on_without(points("decode")[0])

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert not scenario.goes_on_without(points("decode")[0])
    assert planned("decode", workload).goes_on_without(points("decode")[0]), "there is no context on the CPU"


@pytest.mark.parametrize("output", ["image", "mask"])
def test_graphs_on_two_devices_are_compared_value_by_value(workload: Workload, output: str) -> None:
    """Differences of photos are counted, of masks an error. Instead of a second device, one graph is wrong here."""
    opened = Workload.open_loader
    num_opened = 0

    def loader(self: Workload, graph: Any, **options: Any) -> Any:
        nonlocal num_opened
        num_opened += 1
        return opened(self, functools.partial(_wrong, graph, output) if num_opened == 2 else graph, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Workload, "open_loader", loader)
        if output == "mask":
            with pytest.raises(GpuOutputError, match=r"must be equal on both devices, differ in segmentation.mask"):
                check_parity(workload, ON_CPU, name="segmentation")
            return
        figures = check_parity(workload, ON_CPU, name="segmentation")["figures"]
    assert figures["max_difference"] == pytest.approx(0.5)
    assert figures["equal_share"] == 0
    way = {"device": "cpu"}
    with pytest.raises(GpuOutputError, match=r"photo 0: .* gives \[8, 9, 3\], .* gives \[8, 8, 3\]"):
        differences([photo_bytes(0, 9, 8)], way, way | {"rel_start": [0, 0], "rel_shape": [1, 0.9], "axes": (0, 1)})


def _wrong(graph: Any, output: str, components: dp.Components, random: dp.Random) -> dict[str, Any]:
    outputs = graph(components, random)
    return {**outputs, output: outputs[output] + (0.5 if output == "image" else 1)}


def test_all_writes_a_record_each_and_a_report(drawn: ShardSet, tmp_path: Path) -> None:
    """The command for a machine with a GPU also runs on the CPU. A second run skips finished scenarios."""
    done = bench_gpu("--all", "-o", str(tmp_path / "out"), "--shards", str(tmp_path.parent / "none"), "--device", "cpu")
    assert done.exit_code != 0, "it draws no photos in place of shards that it cannot find"
    url, out = drawn.store.locate(""), tmp_path / "out"
    arguments = ("--all", "-o", str(out), "--shards", url, *QUICK, "--no-sweep", "--repeats", "1")
    done = bench_gpu(*arguments)
    assert done.exit_code == 0, done.output
    records = [json.loads(path.read_text()) for path in out.glob("*.json")]
    assert {record["scenario"] for record in records} == set(SCENARIOS)
    timed = [record for report in records if report["scenario"] not in CHECKS for record in report["records"]]
    assert all(record["repeats"][0]["figures"]["samples_per_s"] > 0 for record in timed)
    figures = {
        report["scenario"]: {record["loader"]: record["repeats"][0]["figures"] for record in report["records"]}
        for report in records
    }
    for found in figures["step"].values():  # the emulated step takes its time, whatever the loader does
        assert found["step_share"] == pytest.approx(found["samples_per_s"] / STEP_SAMPLES_PER_S)
    # The two inverse DCTs of the CPU give different pixels. The same graph twice gives equal pixels.
    assert figures["parity"]["cpu, fast idct"]["max_difference"] > 0
    equal = {"equal_share": 1.0, "mean_difference": 0.0, "max_difference": 0.0}
    assert figures["parity"]["graph classification"] == figures["parity"]["graph segmentation"] == equal
    assert not any(report["failed"] for report in records)
    assert all(report["gpu"] is None and report["options"]["device"] == "cpu" for report in records)
    assert "Decoded on the CPU: nothing here says anything about a GPU." in (out / "report.md").read_text()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.json")}
    again = bench_gpu(*arguments)
    assert again.exit_code == 0, again.output
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.json")} == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    """A user who asks for a GPU does not get the CPU's figures."""
    done = bench_gpu("--device", "gpu")
    assert isinstance(done.exception, ValueError)
    assert "--device gpu, and torch finds no CUDA device; --device cpu runs what the CPU can do" in str(done.exception)


def test_use_of_a_gpu_is_the_mean_of_the_samples_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.devices.SAMPLE_S", 0.001)
    asked = threading.Event()
    samples = iter([{"gpu_share": 0.1}, {"gpu_share": 0.3, "jpeg_share": 0.04}])

    def sample() -> dict[str, float]:
        if not (found := next(samples, {})):
            asked.set()
        return found

    with sampling(sample) as means:
        assert asked.wait(240)
    assert means == {"gpu_share": pytest.approx(0.2), "jpeg_share": 0.04}


@pytest.mark.gpu
def test_everything_runs_on_a_gpu(gpu: None, drawn: ShardSet, tmp_path: Path) -> None:
    """All points of all scenarios succeed, parity is measured, and NVML answers."""
    done = bench_gpu(
        "--all", "-o", str(tmp_path / "out"), "--shards", drawn.store.locate(""), "--device", "gpu", "--num-photos",
        "10", "--batch-size", "8", "--seconds", "0.05", "--repeats", "1", "--sweep", "hw_decoder_load=0,1", "--warm-up",
        "0.1",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    records = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")]
    assert [row for report in records for row in report["failed"]] == []
    assert all(report["gpu"]["nvml"] == "read" for report in records)
    (decode,) = (report for report in records if report["scenario"] == "decode")
    assert {record["setting"]["change"] for record in decode["records"]} >= {
        "hw_decoder_load=0.0",
        "hw_decoder_load=1.0",
    }
